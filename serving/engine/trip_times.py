"""TripTimes: how long steps take, measured, so that the planner can bound a call in seconds, know whether guesses pay,
and see what batch work costs those who stream beside it."""

import math
from dataclasses import dataclass

_WEIGHT = 0.25  # of the newest measurement
_FIRST, _GROWTH = 0.25, 1.1  # of the least: how much of the first measurement, and how it follows longer ones
_SURE = 0.8  # of the least

Size = tuple[int, int]


class TripTimes:
    """Owned by the engine's thread. One running mean for each power of two of rows and of tiles, as the compiled shapes
    are; of decode calls, for one trip.

    The first measurement of each is left out: a program's first run also touches memory for the first time.
    """

    def __init__(self, fixed_s: float | None = None) -> None:
        """`fixed_s` is what `estimate` says instead of what was measured."""
        self._fixed_s = fixed_s
        self._mean_s: dict[Size, float] = {}
        self._least_s: dict[Size, float] = {}
        self._ran: set[Size] = set()

    def estimate(self, num_rows: int) -> float:
        """Seconds of a trip with so many rows; infinity as long as nobody knows."""
        if self._fixed_s is not None:
            return self._fixed_s
        return self._mean_s.get(_size(num_rows), math.inf)

    def of_step(self, num_rows: int, num_tiles: int) -> float | None:
        """Seconds of a step with so many rows and tiles, if one of that size was measured."""
        return self._mean_s.get(_size(num_rows, num_tiles))

    def at_most(self, num_rows: int, num_tiles: int) -> float:
        """The least that was measured of any step at least as large, so that one disturbed measurement does not stand
        for ever; 0 as long as nobody knows."""
        rows, tiles = _size(num_rows, num_tiles)
        known = [mean for (r, t), mean in self._mean_s.items() if r >= rows and t >= tiles]
        return min(known, default=0.0)

    def at_least(self, num_rows: int, num_tiles: int) -> float:
        """What a step of that size hardly ever falls short of: a part of the least that was measured lately, since one
        that was held up says nothing about the next. 0 as long as nobody knows."""
        return _SURE * self._least_s.get(_size(num_rows, num_tiles), 0.0)

    def note(self, num_rows: int, call_s: float, num_trips: int, num_tiles: int = 0) -> None:
        """A call took so long; one without trips, whose rows had all ended before, says nothing."""
        size = _size(num_rows, num_tiles)
        if num_trips and size not in self._ran:
            self._ran.add(size)
        elif num_trips:
            trip_s = call_s / num_trips
            self._least_s[size] = min(trip_s, _GROWTH * self._least_s.get(size, _FIRST * trip_s))
            self._mean_s[size] = (1 - _WEIGHT) * self._mean_s.get(size, trip_s) + _WEIGHT * trip_s


@dataclass(frozen=True, slots=True)
class Measured:
    """A call that has been read, whose time is to be noted."""

    times: TripTimes
    num_rows: int
    num_trips: int
    num_tiles: int = 0

    def note(self, took_s: float) -> None:
        self.times.note(self.num_rows, took_s, self.num_trips, self.num_tiles)


def _size(num_rows: int, num_tiles: int = 0) -> Size:
    return max(0, num_rows - 1).bit_length(), num_tiles and (num_tiles - 1).bit_length() + 1
