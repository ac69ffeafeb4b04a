"""Places: who is let in now, who waits at the door and who is to come back when. The clock is the caller's.

Who is refused is promised a place. If he comes back when he was told and there is none yet, he waits at the door,
before everybody else; a newcomer gets no place that is kept for one who was told. So a promise may be made a little
early without being broken, and no place stays empty for the sake of one.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from serving.gateway.admission.promises import Promises
from serving.gateway.admission.queue_time import MAX_RETRY_AFTER_S, DrainRate, seconds_until, whole_seconds

AT_DOOR = 4
"""Answers that may wait at the door, per place in the gateway."""


@dataclass(slots=True, eq=False)
class Place:
    """Of one request in the gateway, or at its door."""

    answers: int
    tokens: int
    """That each of them may take."""
    entered: bool = False


class Places:
    """Counts, a queue at the door, and the rate at which answers end."""

    def __init__(self, max_answers: int) -> None:
        self.max_answers = max_answers
        self.num_in_flight = 0
        self.num_at_door = 0
        self._tokens_in_flight = 0
        self._slots = 1
        self._door: deque[Place] = deque()
        self._promises = Promises()
        self._rate = DrainRate()

    def ask(self, now_s: float, place: Place, slots: int, caller: Callable[[], int]) -> int:
        """Seconds after which to come back; 0 for who may stay: in his place (`place.entered`), or at the door until
        `leave` or `give_up` tells that he has one. `slots` is how many answers can be made at once now."""
        self._pass_time(now_s)
        self._slots = max(1, slots)
        if not self._promises and self._has_room(place):  # the usual case
            self._enter(place)
            return 0
        name = caller()
        if self._promises.claim(name, place.answers, now_s):
            if self._has_room(place):
                self._enter(place)
                return 0
            if self.num_at_door + place.answers <= AT_DOOR * self.max_answers:
                self._door.append(place)
                self.num_at_door += place.answers
                return 0
        elif self._has_room(place, self._promises.num_kept):
            self._enter(place)
            return 0
        return self._promise(now_s, place, name)

    def promise(self, now_s: float, place: Place, caller: Callable[[], int]) -> int:
        """For one who was let in, and refused further on: seconds after which to come back."""
        self._pass_time(now_s)
        return self._promise(now_s, place, caller())

    def leave(self, now_s: float, place: Place, *, served: bool) -> list[Place]:
        """Those of the door who come in. What was refused further on says nothing about the time that answers take:
        `served` is False then."""
        self._pass_time(now_s)
        if served:
            self._rate.end(place.answers, place.tokens, self._num_running, self._slots)
        self.num_in_flight -= place.answers
        self._tokens_in_flight -= place.answers * place.tokens
        return self._admit_from_door()

    def give_up(self, place: Place) -> list[Place]:
        """One of the door goes; those behind him who come in for that."""
        self._door.remove(place)
        self.num_at_door -= place.answers
        return self._admit_from_door()

    def expected_wait_s(self, now_s: float, slots: int) -> float:
        """Until an answer begins that comes behind all in flight."""
        self._pass_time(now_s)
        self._slots = max(1, slots)
        return self._seconds_until(self.num_in_flight + 1 - self._slots)

    @property
    def num_waiting(self) -> int:
        return max(0, self.num_in_flight - self._slots)

    @property
    def _num_running(self) -> int:
        return min(self.num_in_flight, self._slots)

    def _promise(self, now_s: float, place: Place, caller: int) -> int:
        """Behind all who were promised a place before, but early: by all places there are once it is known how fast
        answers end, and by all the door holds before. So nobody's place is empty until he comes, if answers end sooner
        than expected, and nobody is refused again, if they end later. Those who come in one second find room there."""
        early = self.max_answers * (AT_DOOR - (AT_DOOR - 1) * self._rate.known)
        ahead = self.num_in_flight + self.num_at_door + self._promises.num_answers
        ends = ahead + place.answers - self.max_answers - int(early)
        due_s = max(self._seconds_until(ends), 2 * ends / (AT_DOOR * self.max_answers))
        wait_s = whole_seconds(due_s)
        if due_s < MAX_RETRY_AFTER_S:
            self._promises.make(caller, place.answers, now_s + wait_s)
        return wait_s

    def _seconds_until(self, num_ends: int) -> float:
        mean = self._tokens_in_flight / max(1, self.num_in_flight)
        return seconds_until(num_ends, mean, self._slots, self._rate.per_slot(mean * self._num_running))

    def _has_room(self, place: Place, num_kept: int = 0) -> bool:
        return not self._door and self.num_in_flight + num_kept + place.answers <= self.max_answers

    def _enter(self, place: Place) -> None:
        place.entered = True
        self.num_in_flight += place.answers
        self._tokens_in_flight += place.answers * place.tokens

    def _admit_from_door(self) -> list[Place]:
        """In order: one who wants many places is not passed by."""
        admitted = []
        while self._door and self.num_in_flight + self._door[0].answers <= self.max_answers:
            place = self._door.popleft()
            self.num_at_door -= place.answers
            self._enter(place)
            admitted.append(place)
        return admitted

    def _pass_time(self, now_s: float) -> None:
        self._rate.pass_time(now_s, self._num_running)
        self._promises.pass_time(now_s)
