"""WaitingQueue: sequences without a slot, best rank first. Owned by the engine's thread.

Within a band it is first come first served, and a preempted sequence goes back to the place of its arrival. A deadline
does not move a request forward, which could hold up others for ever: it says until when an answer is worth starting.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence as Items
from itertools import pairwise

from serving.engine.sequence import Sequence, rank

SPARE = 64  # deadlines of others that are kept, so that throwing them away pays


class WaitingQueue:
    def __init__(self) -> None:
        self._ranked: list[Sequence] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._ranked)

    @property
    def ranked(self) -> Items[Sequence]:
        """Best rank first; not to be changed."""
        return self._ranked

    def add(self, sequence: Sequence) -> None:
        insort(self._ranked, sequence, key=rank)
        if sequence.request.deadline is not None and not sequence.was_admitted:
            if len(self._deadlines) > 2 * len(self._ranked) + SPARE:  # most of them wait no more
                self._deadlines = [entry for entry in self._deadlines if _may_be_late(entry[-1])]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (sequence.request.deadline, sequence.arrival, sequence))

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._ranked, rank(sequence), key=rank)
        assert self._ranked[index] is sequence, "the sequence does not wait"
        del self._ranked[index]

    def overdue(self, now: float) -> list[Sequence]:
        """Waiting sequences that were never admitted and whose deadline has passed; each is told once."""
        late: dict[Sequence, None] = {}  # a promoted sequence was added twice
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heapq.heappop(self._deadlines)[-1]
            if _may_be_late(sequence):
                late[sequence] = None
        return list(late)

    def check_integrity(self, max_trips: int = 1) -> None:
        """Assert the order, and that nobody here has a slot or waits for more tokens than one call can give."""
        ranks = [rank(sequence) for sequence in self._ranked]
        assert all(a < b for a, b in pairwise(ranks)), "the queue is out of order"
        assert all(s.slot < 0 and s.finish_reason is None and 0 <= s.num_pending <= max_trips for s in self._ranked)


def _may_be_late(sequence: Sequence) -> bool:
    return not sequence.was_admitted and sequence.finish_reason is None
