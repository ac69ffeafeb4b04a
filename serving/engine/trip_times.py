"""TripTimes: how long one trip of a decode call takes, measured, so that the planner can bound a call in seconds, and
know whether guesses pay."""

import math

_WEIGHT = 0.25  # of the newest measurement


class TripTimes:
    """Owned by the engine's thread. One running mean for each power of two of rows, as the compiled shapes are.

    The first measurement of each is left out: a program's first run also touches memory for the first time.
    """

    def __init__(self, fixed_s: float | None = None) -> None:
        """`fixed_s` is what `estimate` says instead of what was measured."""
        self._fixed_s = fixed_s
        self._mean_s: dict[int, float] = {}
        self._ran: set[int] = set()

    def estimate(self, num_rows: int) -> float:
        """Seconds of a trip with so many rows; infinity as long as nobody knows."""
        if self._fixed_s is not None:
            return self._fixed_s
        return self._mean_s.get(_size(num_rows), math.inf)

    def note(self, num_rows: int, call_s: float, num_trips: int) -> None:
        """A decode call took so long; one without trips, whose rows had all ended before, says nothing."""
        size = _size(num_rows)
        if num_trips and size not in self._ran:
            self._ran.add(size)
        elif num_trips:
            trip_s = call_s / num_trips
            self._mean_s[size] = (1 - _WEIGHT) * self._mean_s.get(size, trip_s) + _WEIGHT * trip_s


def _size(num_rows: int) -> int:
    return max(0, num_rows - 1).bit_length()
