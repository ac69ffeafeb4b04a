"""Speculation: which sequences get guesses for the next call, and whether that pays.

A call that checks guesses gives a row several tokens when they are right, and costs more than a plain one. Both are
measured: how often a sequence's guesses came true, and what calls take. Guesses need all tokens of a sequence on the
host. So a sequence that has a guess while a call of its own is in flight is held back until that is read, and one whose
guesses are being checked is not dispatched again before.
"""

import math

import numpy as np
from numpy.typing import NDArray

from serving.engine.batch import NOTHING
from serving.engine.slots import SlotTable

PROBE_EVERY = 64  # calls without guesses, after which some are checked whether it pays or not


def pays(num_tokens: float, num_rows: int, plain_s: float, verify_s: float) -> bool:
    """Whether a call that checks guesses, gives `num_tokens` in all and takes `verify_s` beats plain ones, which give
    one token per row in `plain_s`. A time that nobody has measured is infinite: the plain one is measured first."""
    if math.isinf(plain_s):
        return False
    return math.isinf(verify_s) or num_tokens * plain_s > num_rows * verify_s


class Speculation:
    """Owned by the engine's thread."""

    def __init__(self, max_drafts: int) -> None:
        """At most so many tokens are guessed per sequence and call; 0 for never."""
        self._max_drafts = max_drafts
        self._num_plain = 0

    def draft(self, slots: SlotTable, plain_s: float, verify_s: float) -> NDArray[np.int32] | None:
        """int32[B, max_drafts] guesses for the next call, filled up with NOTHING; None for a plain call. Sequences that
        must be read first are marked in `slots.unread_B`."""
        rows = slots.decoding()
        candidates = rows[slots.speculates_B[rows]]
        if not len(candidates):
            return None
        if not self._is_worth_it(len(rows) + len(candidates) * self._max_drafts, len(rows), plain_s, verify_s):
            return None
        guessed: dict[int, list[int]] = {}
        num_tokens = float(len(rows))
        for slot, sequence in zip(candidates.tolist(), slots.at(candidates), strict=True):
            room = int(slots.max_len_B[slot] - slots.num_tokens_B[slot]) - 1  # the call gives one token anyway
            tokens = sequence.guesses.ngrams.propose(sequence.token_ids, min(self._max_drafts, room))
            if tokens:
                guessed[slot] = tokens
                num_tokens += sequence.guesses.expect(len(tokens))
        if not guessed or not self._is_worth_it(num_tokens, len(rows), plain_s, verify_s):
            return None
        drafts_BD = np.full((len(slots.sequences), self._max_drafts), NOTHING, np.int32)
        for slot, tokens in guessed.items():
            if slots.num_pending(slot):
                slots.unread_B[slot] = True
            else:
                drafts_BD[slot, : len(tokens)] = tokens
                self._num_plain = 0
        return drafts_BD if (drafts_BD != NOTHING).any() else None

    def _is_worth_it(self, num_tokens: float, num_rows: int, plain_s: float, verify_s: float) -> bool:
        if pays(num_tokens, num_rows, plain_s, verify_s):
            return True
        self._num_plain += 1
        return self._num_plain > PROBE_EVERY and not math.isinf(plain_s)
