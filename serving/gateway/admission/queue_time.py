"""How long a queue takes: how fast answers end, and from it when a place will be free.

Everything is arithmetic on values; the clock is the caller's.
"""

import math
from dataclasses import dataclass

MOST_TOKENS = 256
"""An answer that may be longer counts as so long: hardly any uses all of what it may."""
FIRST_GUESS = 20.0
"""Tokens per second of a busy slot, before the first answer has ended."""
LEAST_RATE = 1e-3
"""Tokens per second of a busy slot: something ends some day."""
MEMORY = 4
"""Answers per slot after which what was measured counts a third. Answers that begin together end together, so fewer
would be measured from a part of a crowd."""
MAX_RETRY_AFTER_S = 600


@dataclass(slots=True)
class DrainRate:
    """Tokens of ended answers per second of a busy slot, an answer counted as what it may take. Idle time teaches
    nothing and is left out; so a burst after a quiet hour finds the rate of the last busy seconds."""

    ended: float = FIRST_GUESS
    busy_slot_s: float = 1.0
    """Both fade with each answer that ends."""
    running_slot_s: float = 0.0
    """Spent on answers that have not ended: each takes its share of this to `busy_slot_s` as it ends."""
    known: float = 0.0
    """0 to 1: how much of it was measured, and not guessed."""
    at_s: float | None = None

    def pass_time(self, now_s: float, running: int) -> None:
        """So many slots were busy since the last call."""
        passed_s = 0.0 if self.at_s is None else max(0.0, now_s - self.at_s)
        self.at_s = now_s
        self.running_slot_s += running * passed_s

    def end(self, answers: int, tokens: int, running: int, slots: int) -> None:
        """Of `running` answers, in that many slots; `tokens` is what one of them might take."""
        fading = math.exp(-answers / (MEMORY * slots))
        spent_s = self.running_slot_s * min(1.0, answers / max(1, running))
        self.running_slot_s -= spent_s
        self.busy_slot_s = self.busy_slot_s * fading + spent_s
        self.ended = self.ended * fading + answers * tokens
        self.known = 1 - (1 - self.known) * fading

    def per_slot(self, running_tokens: float) -> float:
        """Tokens per second. As long as nothing ends, what was measured stands, until it would have ended all that runs
        (`running_tokens`): then they have taken longer than that, and may end now."""
        measured = self.ended / max(self.busy_slot_s, 1e-9)
        ended_now = (self.ended + running_tokens) / max(self.busy_slot_s + self.running_slot_s, 1e-9)
        return max(min(measured, ended_now), LEAST_RATE)


def seconds_until(num_ends: int, tokens: float, slots: int, per_slot: float) -> float:
    """Until so many answers of `tokens` have ended."""
    return max(0, num_ends) * tokens / (slots * per_slot)


def whole_seconds(wait_s: float) -> int:
    """What a header can say: 1 to MAX_RETRY_AFTER_S."""
    return int(min(max(1.0, wait_s), MAX_RETRY_AFTER_S))
