"""Promises: who was told when to come back. The clock is the caller's.

A caller is known by what he asks, since that is what he repeats: by a digest of his request.
"""

import heapq
from collections import deque
from dataclasses import dataclass
from itertools import count

KEPT_S = 1.0
"""Seconds for which a place is kept for somebody who does not come."""
LATE_S = 10.0
"""Seconds after which one who was told counts as a newcomer."""
MAX_PROMISES = 65_536


@dataclass(slots=True, eq=False)
class Promise:
    caller: int
    answers: int
    due_s: float
    is_open: bool = True
    """Nobody has come for it yet."""


class Promises:
    """From `make` a promise is due at its time, then kept for KEPT_S, then late for LATE_S, then forgotten."""

    def __init__(self) -> None:
        self._order = count()
        self._coming: list[tuple[float, int, Promise]] = []
        """A heap by the time at which they are due."""
        self._kept: deque[Promise] = deque()
        self._late: deque[Promise] = deque()
        self._of_caller: dict[int, deque[Promise]] = {}
        self.num_coming = self.num_kept = 0
        """Answers that are due later, and those for which a place is kept now."""

    def __len__(self) -> int:
        """Those that take memory."""
        return len(self._coming) + len(self._kept) + len(self._late)

    @property
    def num_answers(self) -> int:
        """Those for whom there must be room, now or later."""
        return self.num_coming + self.num_kept

    def make(self, caller: int, answers: int, due_s: float) -> None:
        """Beyond MAX_PROMISES, who comes back is a newcomer."""
        if len(self) < MAX_PROMISES:
            promise = Promise(caller, answers, due_s)
            heapq.heappush(self._coming, (due_s, next(self._order), promise))
            self._of_caller.setdefault(caller, deque()).append(promise)
            self.num_coming += answers

    def claim(self, caller: int, answers: int, now_s: float) -> bool:
        """Whether this caller was told to come back by now; then that is done."""
        self.pass_time(now_s)
        mine = self._of_caller.get(caller, ())
        promise = next((one for one in mine if one.due_s <= now_s and one.answers == answers), None)
        if promise is None:
            return False
        if now_s < promise.due_s + KEPT_S:
            self.num_kept -= answers
        self._close(promise)
        return True

    def pass_time(self, now_s: float) -> None:
        while self._coming and self._coming[0][0] <= now_s:
            promise = heapq.heappop(self._coming)[2]
            self.num_coming -= promise.answers
            self.num_kept += promise.answers
            self._kept.append(promise)
        while self._kept and self._kept[0].due_s + KEPT_S <= now_s:
            promise = self._kept.popleft()
            if promise.is_open:
                self.num_kept -= promise.answers
                self._late.append(promise)
        while self._late and self._late[0].due_s + LATE_S <= now_s:
            promise = self._late.popleft()
            if promise.is_open:
                self._close(promise)

    def _close(self, promise: Promise) -> None:
        promise.is_open = False
        mine = self._of_caller[promise.caller]
        mine.remove(promise)
        if not mine:
            del self._of_caller[promise.caller]
