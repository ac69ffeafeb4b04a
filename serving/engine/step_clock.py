"""StepClock: the time of the engine thread, split into waiting for the tokens of the device and everything else.

A busy device and an idle host show as waiting; a step that is all host time leaves the device idle.
"""

import time
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


class StepClock:
    """Owned by the engine's thread. Seconds since it was made, over all steps."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.host_s = 0.0
        """Planning, building, dispatching, committing."""
        self.device_wait_s = 0.0
        """Waiting until the tokens of a step are on the host."""
        self.last_host_s = 0.0
        """Of the step that ended last."""
        self._now = now
        self._started = self._waited = self._call_ended = 0.0

    def now(self) -> float:
        return self._now()

    def start_step(self) -> None:
        self._started, self._waited = self._now(), 0.0

    def wait_for(self, read: Callable[[], ResultT]) -> ResultT:
        """Count the time of `read` as waiting."""
        before = self._now()
        result = read()
        self._waited += self._now() - before
        return result

    def run_s(self, dispatched_s: float) -> float:
        """Seconds that a call dispatched then has had the device for itself, if the call before it has been read."""
        return self._now() - max(dispatched_s, self._call_ended)

    def end_call(self, dispatched_s: float) -> float:
        """Seconds that a call, whose tokens have just been read, had the device for itself: since it was dispatched, or
        since the call before it was done. Where the host is late it is an upper bound."""
        ended = self._now()
        call_s = ended - max(dispatched_s, self._call_ended)
        self._call_ended = ended
        return call_s

    def end_step(self) -> tuple[float, float]:
        """Host seconds and waiting seconds of this step."""
        host_s = self._now() - self._started - self._waited
        self.host_s += host_s
        self.last_host_s = host_s
        self.device_wait_s += self._waited
        return host_s, self._waited
