"""StepRing: what the last steps planned, kept so that a crash can be explained. Small frozen values, no arrays.

Written by the engine's thread before each dispatch, so the step that fails is the last one in the file; its times are
missing, since it never ended.
"""

import json
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from serving.engine.plan import StepPlan
from serving.request import Load

NUM_STEPS = 256
MAX_FILES = 8
PREFIX = "steps-"


class StepRecord(NamedTuple):
    """One planned step."""

    number: int
    """Steps dispatched before it."""
    at_unix_s: float
    shape: str
    """The compiled program."""
    num_decode: int
    """Rows that decode."""
    num_trips: int
    """Tokens for each of them."""
    num_prefill: int
    """Rows that prefill."""
    prefill_tokens: int
    num_running: int
    num_waiting: int
    free_pages: int
    admitted: tuple[str, ...] = ()
    """Ids of requests that got a slot in this step."""
    preempted: tuple[str, ...] = ()
    """Ids of requests that lost theirs."""
    host_s: float | None = None
    """Seconds of the engine's thread, without waiting; None: the step did not end."""
    device_wait_s: float | None = None
    """Seconds that this call waited for the tokens of the step before."""

    @classmethod
    def of(cls, plan: StepPlan, shape: str, number: int, load: Load) -> "StepRecord":
        """A committed plan that is about to be dispatched."""
        return cls(
            number=number,
            at_unix_s=time.time(),
            shape=shape,
            num_decode=len(plan.decode),
            num_trips=plan.num_trips,
            num_prefill=len(plan.prefill),
            prefill_tokens=sum(chunk.length for chunk in plan.prefill),
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            free_pages=load.free_pages,
            admitted=tuple(admission.sequence.request_id for admission in plan.admit),
            preempted=tuple(sequence.request_id for sequence in plan.preempt),
        )


class StepRing:
    """Holds the newest `num_steps` records. Owned by the engine's thread."""

    def __init__(self, num_steps: int = NUM_STEPS) -> None:
        self._records: deque[StepRecord] = deque(maxlen=num_steps)

    @property
    def records(self) -> tuple[StepRecord, ...]:
        """Oldest first."""
        return tuple(self._records)

    def add(self, record: StepRecord) -> None:
        """Before the step is dispatched."""
        self._records.append(record)

    def end(self, host_s: float, device_wait_s: float) -> None:
        """The call of the newest step came back. Ignored when it has ended already: a call may dispatch nothing."""
        if self._records and self._records[-1].host_s is None:
            self._records[-1] = self._records[-1]._replace(host_s=host_s, device_wait_s=device_wait_s)

    def dump(self, folder: Path) -> Path:
        """Write one JSON object per line and return the file; only the newest `MAX_FILES` stay. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{PREFIX}{time.time_ns()}.jsonl"
        path.write_text("".join(json.dumps(record._asdict()) + "\n" for record in self._records))
        for old in sorted(folder.glob(f"{PREFIX}*.jsonl"))[:-MAX_FILES]:
            old.unlink(missing_ok=True)  # another replica may keep its dumps here, and clean up too
        return path
