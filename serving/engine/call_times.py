"""CallTimes: what the engine learns of the time of its calls, and what follows from it."""

import numpy as np
from numpy.typing import NDArray

from serving.engine.in_flight import InFlight
from serving.engine.step_clock import StepClock
from serving.engine.trip_times import Measured, TripTimes
from serving.engine.trips import ENDED


class CallTimes:
    """Owned by the engine's thread."""

    def __init__(self, clock: StepClock, trip_s: float | None, verify_s: float | None) -> None:
        """`trip_s` and `verify_s` stand in place of measured times."""
        self._clock = clock
        self.trips, self.verify = TripTimes(trip_s), TripTimes(verify_s)
        """Of plain calls, and of those that check guesses."""
        self.costs = self.trips if trip_s is None else None
        """None where nothing is measured."""
        self.took_s = 0.0
        """Seconds of the newest call that has been read: what the next step learns from it."""
        self._measured: Measured | None = None

    def note(self, step: InFlight, tokens_RI: NDArray[np.int32], *, beside_copies: bool) -> None:
        """A step was just read. To be learned from by the next one, when all hosts know what the first has measured;
        not where pages were copied before it, which takes time, too."""
        self.took_s = self._clock.end_call(step.dispatched_s)
        if beside_copies or not step.is_timed:
            return
        num_trips = 1 if step.num_tiles else int(np.count_nonzero(tokens_RI.max(axis=0) != ENDED))
        if step.num_drafts_r is None:
            self._measured = Measured(self.trips, step.num_rows, num_trips, step.num_tiles)
        else:  # nothing was dispatched meanwhile, so the host's time comes on top
            self.took_s += self._clock.last_host_s
            self._measured = Measured(self.verify, step.num_rows, min(num_trips, 1))

    def learn(self, took_s: float) -> None:
        """The step that was noted took so long."""
        if self._measured is not None:
            self._measured.note(took_s)
            self._measured = None

    def spare_s(self, step: InFlight | None) -> float:
        """Seconds for which the next step may still wait for newcomers, since the device is busy for longer with this
        one: it runs in order, so a step dispatched any sooner begins no sooner. Twice the host's time for a step comes
        off, since that varies. 0 as long as nobody knows."""
        if step is None or self.costs is None or step.num_drafts_r is not None:
            return 0.0
        busy_s = self.trips.at_least(step.num_rows, step.num_tiles) - self._clock.run_s(step.dispatched_s)
        return max(0.0, busy_s - 2 * self._clock.last_host_s)
