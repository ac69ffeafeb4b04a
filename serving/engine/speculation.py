"""Speculation: which sequences get guesses for the next call, and whether that pays.

A call that checks guesses gives a row several tokens when they are right, and costs more than a plain one. Both are
measured: how often a sequence's guesses came true, and what calls take. Guesses need all tokens of a sequence on the
host. So a sequence that has a guess while a call of its own is in flight is held back until that is read, and one whose
guesses are being checked is not dispatched again before.

Guesses come from a Drafter: the sequence's own text, or a draft model.
"""

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serving.engine.batch import NOTHING
from serving.engine.guesses import HOPE, learn_rate
from serving.engine.plan import Chunk
from serving.engine.sequence import Sequence
from serving.engine.slots import SlotTable

Drafts = tuple[NDArray[np.int32] | None, tuple[Chunk, ...]]
"""int32[B, max_drafts] guesses for the next call, filled up with NOTHING; None for a plain call. And what a draft model
must read in either case."""
NO_DRAFTS: Drafts = None, ()
PROBE_EVERY = 64  # calls without guesses, after which some are checked whether it pays or not
_WEIGHT = 0.1  # of the newest measurement, over all sequences


def pays(num_tokens: float, num_rows: int, plain_s: float, verify_s: float) -> bool:
    """Whether a call that checks guesses, gives `num_tokens` in all and takes `verify_s` beats plain ones, which give
    one token per row in `plain_s`. A time that nobody has measured is infinite: the plain one is measured first."""
    if math.isinf(plain_s):
        return False
    return math.isinf(verify_s) or num_tokens * plain_s > num_rows * verify_s


class Drafter(Protocol):
    """Who guesses."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """At most `most` next tokens of a sequence; DRAFTED stands for one that the call itself finds."""
        ...

    def get_ready(self, sequences: list[Sequence]) -> tuple[list[Sequence], tuple[Chunk, ...]]:
        """Those of these decoding sequences whose proposals can be checked in the next call, and what a draft model
        must read before."""
        ...


class Speculation:
    """Owned by the engine's thread."""

    def __init__(self, max_drafts: int, drafter: Drafter) -> None:
        """At most so many tokens are guessed per sequence and call."""
        self._max_drafts = max_drafts
        self._drafter = drafter
        self._hope = HOPE
        self._num_plain = 0

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """How a sequence's guesses went in a call: what to expect of those that have had none."""
        self._hope = learn_rate(self._hope, num_drafted, num_accepted, _WEIGHT)

    def draft(self, slots: SlotTable, plain_s: float, verify_s: float) -> Drafts:
        """For the next call. Sequences that must be read first are marked in `slots.unread_B`."""
        rows = slots.decoding()
        candidates = rows[slots.speculates_B[rows]]
        if not len(candidates):
            return NO_DRAFTS
        if not self._is_worth_it(len(rows) + len(candidates) * self._max_drafts, len(rows), plain_s, verify_s):
            return NO_DRAFTS
        guessed: dict[Sequence, list[int]] = {}
        num_tokens = float(len(rows))
        for slot, sequence in zip(candidates.tolist(), slots.at(candidates), strict=True):
            room = int(slots.max_len_B[slot] - slots.num_tokens_B[slot]) - 1  # the call gives one token anyway
            tokens = self._drafter.propose(sequence, min(self._max_drafts, room))
            if tokens:
                guessed[sequence] = tokens
                if not sequence.guesses.num_drafted:
                    sequence.guesses.rate = self._hope
                num_tokens += sequence.guesses.expect(len(tokens))
        if not guessed or not self._is_worth_it(num_tokens, len(rows), plain_s, verify_s):
            return NO_DRAFTS
        ready, catch_up = self._drafter.get_ready(list(guessed))
        drafts_BD = np.full((len(slots.sequences), self._max_drafts), NOTHING, np.int32)
        for sequence in ready:
            if slots.num_pending(sequence.slot):
                slots.unread_B[sequence.slot] = True
            else:
                drafts_BD[sequence.slot, : len(guessed[sequence])] = guessed[sequence]
                if not catch_up:  # else its time says nothing, and one more is due
                    self._num_plain = 0
        return drafts_BD if (drafts_BD != NOTHING).any() else None, catch_up

    def _is_worth_it(self, num_tokens: float, num_rows: int, plain_s: float, verify_s: float) -> bool:
        if pays(num_tokens, num_rows, plain_s, verify_s):
            return True
        self._num_plain += 1
        return self._num_plain > PROBE_EVERY and not math.isinf(plain_s)
