"""Who guesses how a sequence goes on: its own text, or a draft model. The two Drafters of `speculation`."""

from kv.page_table import pages_for
from serving.engine.draft_step import CATCH_UP_TILE
from serving.engine.plan import Chunk
from serving.engine.sequence import Sequence

DRAFTED = 0
"""In the place of a guess: the draft model makes it, in the call that checks it."""


class TextDrafter:
    """What followed the same tokens before, see `ngrams`."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        return sequence.guesses.ngrams.propose(sequence.token_ids, most)

    def get_ready(self, sequences: list[Sequence]) -> tuple[list[Sequence], tuple[Chunk, ...]]:
        return sequences, ()


class ModelDrafter:
    """A draft model can always guess, once it has read all tokens but the newest."""

    def __init__(self, max_tiles: int) -> None:
        """Before one call it reads at most so many tiles."""
        self._max_tiles = max_tiles

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        return [DRAFTED] * most

    def get_ready(self, sequences: list[Sequence]) -> tuple[list[Sequence], tuple[Chunk, ...]]:
        """Ready is also who has tokens in flight and no more to read than those, which is soon done."""
        ready, catch_up, num_tiles = [], [], self._max_tiles
        for sequence in sequences:
            start, end = sequence.num_drafted, len(sequence.token_ids) - 1
            length = min(end - start, num_tiles * CATCH_UP_TILE)
            if length > 0:
                catch_up.append(Chunk(sequence, start, length))
                num_tiles -= pages_for(length, CATCH_UP_TILE)
            if start + length >= end:
                ready.append(sequence)
        return ready, tuple(catch_up)
