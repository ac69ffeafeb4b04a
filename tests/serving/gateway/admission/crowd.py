"""A crowd before a gateway, on a clock of its own: clients who come, and come back when they were told."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from serving.gateway.admission.places import Place, Places
from serving.gateway.admission.queue_time import MAX_RETRY_AFTER_S


@dataclass
class Crowd:
    """A gateway in front of a replica with `slots`. An answer takes `answer_s(running)` seconds, where so many run."""

    max_queued: int
    slots: int
    answer_s: Callable[[int], float]
    tokens: int = 256
    lateness_s: Callable[[], float] = lambda: 0.01
    """How much later than told somebody is back."""
    now_s: float = 0.0
    num_told: int = 0
    num_came_back: int = 0
    num_refused_again: int = 0
    longest_empty_s: float = 0.0
    """The longest time for which a place was empty while somebody who was told was away."""
    longest_at_door_s: float = 0.0
    num_served: int = 0
    num_given_up: int = 0

    def __post_init__(self):
        self.places = Places(self.max_queued)
        self._events, self._order = [], itertools.count()
        self._queue, self._running = [], 0
        self._at_door = {}
        self._away = 0
        self._empty_since = None

    def come(self, at_s: float, caller: int, answers: int = 1):
        self._at(at_s, "come", (caller, answers, False))

    def run(self):
        """Until everybody has been served."""
        while self._events:
            self.now_s, _, what, who = heapq.heappop(self._events)
            getattr(self, f"_{what}")(*who)
            self._serve()
            self._watch()
        assert not self.places.num_in_flight and not self.places.num_at_door
        return self

    def _at(self, at_s, what, who):
        heapq.heappush(self._events, (at_s, next(self._order), what, who))

    def _come(self, caller, answers, was_told):
        self._away -= was_told
        self.num_came_back += was_told
        place = Place(answers, self.tokens)
        wait_s = self.places.ask(self.now_s, place, self.slots, lambda: caller)
        if wait_s == MAX_RETRY_AFTER_S:
            self.num_given_up += 1
            self.num_refused_again += was_told
        elif wait_s:
            self.num_told += 1
            self.num_refused_again += was_told
            self._away += 1
            self._at(self.now_s + wait_s + self.lateness_s(), "come", (caller, answers, True))
        elif place.entered:
            self._queue.append([place, answers])
        else:
            self._at_door[place] = self.now_s

    def _end(self, entry):
        self._running -= 1
        entry[1] -= 1
        if entry[1] > 0:
            return
        self.num_served += 1
        for place in self.places.leave(self.now_s, entry[0], served=True):
            self.longest_at_door_s = max(self.longest_at_door_s, self.now_s - self._at_door.pop(place))
            self._queue.append([place, place.answers])

    def _serve(self):
        while self._queue and self._running < self.slots:
            entry = self._queue[0]
            entry[1:] = [entry[1], entry[2] - 1] if len(entry) > 2 else [entry[1], entry[1] - 1]
            if entry[2] == 0:
                self._queue.pop(0)
            self._running += 1
            self._at(self.now_s + self.answer_s(self._running), "end", (entry,))

    def _watch(self):
        is_empty = self._away > 0 and self.places.num_in_flight < self.max_queued
        if self._empty_since is not None:
            self.longest_empty_s = max(self.longest_empty_s, self.now_s - self._empty_since)
        if not is_empty:
            self._empty_since = None
        elif self._empty_since is None:
            self._empty_since = self.now_s
