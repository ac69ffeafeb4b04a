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
        self._now = now
        self._started = self._waited = 0.0

    def start_step(self) -> None:
        self._started, self._waited = self._now(), 0.0

    def wait_for(self, read: Callable[[], ResultT]) -> ResultT:
        """Count the time of `read` as waiting."""
        before = self._now()
        result = read()
        self._waited += self._now() - before
        return result

    def end_step(self) -> tuple[float, float]:
        """Host seconds and waiting seconds of this step."""
        host_s = self._now() - self._started - self._waited
        self.host_s += host_s
        self.device_wait_s += self._waited
        return host_s, self._waited
