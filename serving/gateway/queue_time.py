"""How long a queue takes: how fast answers end, smoothed, and from it when the refused should come back.

Everything is arithmetic on values; the clock is the caller's.
"""

import math
from dataclasses import dataclass

MEMORY_S = 5.0  # busy seconds after which what was measured counts a third
MAX_RETRY_AFTER_S = 30
LEAST_RATE = 1e-3  # answers per second: something ends some day
PROMISED = 0.8  # share of the room that is promised: answers do not end at an even pace


@dataclass(slots=True)
class DrainRate:
    """Answers that end per second of a busy slot. Idle time teaches nothing and is left out; so a burst after a quiet
    hour finds the rate of the last busy seconds."""

    ended: float = 1.0
    busy_slot_s: float = 1.0
    """Both fade. An answer a second is as good a guess as any before the first has ended."""
    at_s: float | None = None

    def pass_time(self, now_s: float, busy_slots: int) -> None:
        """So many slots were busy since the last call."""
        passed_s = 0.0 if self.at_s is None else max(0.0, now_s - self.at_s)
        self.at_s = now_s
        if busy_slots and passed_s:
            fading = math.exp(-passed_s / MEMORY_S)
            self.ended *= fading
            self.busy_slot_s = self.busy_slot_s * fading + busy_slots * passed_s

    def end(self, answers: int) -> None:
        self.ended += answers

    def per_second(self, slots: int) -> float:
        """Of that many slots, all busy."""
        return max(slots * self.ended / self.busy_slot_s, LEAST_RATE)


def expected_wait_s(num_waiting: int, rate: float) -> float:
    """Until an answer begins that comes behind so many."""
    return num_waiting / rate


def plan_return(
    now_s: float, answers: int, num_waiting: int, rate: float, max_queued: int, promised_until_s: float
) -> tuple[int, float]:
    """When one who is refused should come back: whole seconds, 1 to 30, and until when room is promised now.

    Not before the queue is worked off, and behind all who were refused before and have not come back yet. They come
    back on whole seconds and so in crowds: no second gets more of them than the queue holds.
    """
    spacing_s = answers / (PROMISED * min(rate, max_queued))
    due_s = max(promised_until_s, now_s + expected_wait_s(num_waiting, rate)) + spacing_s
    wait_s = min(max(1, math.ceil(due_s - now_s)), MAX_RETRY_AFTER_S)
    return wait_s, min(due_s, now_s + MAX_RETRY_AFTER_S)
