"""NgramIndex: guesses how a text goes on from how it went on before (prompt lookup, Saxena 2023).

Answers that quote their prompt, rewrite code or repeat themselves are guessed well, at no cost but a dictionary.
"""

from collections.abc import Sequence

SIZES = (3, 2)  # tokens that must agree, longest first


class NgramIndex:
    """Of one sequence, whose tokens may only be appended to. As large as the sequence."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}  # where the text went on after these tokens, the last time
        self._num_read = 0

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow; none where the last two never stood together before.

        What reaches the end of the text goes on from where it began: a text that repeats itself does so for ever.
        """
        self._read(token_ids)
        end = len(token_ids)
        for size in SIZES:
            start = self._next.get(tuple(token_ids[end - size :])) if end > size else None
            if start is not None:
                return [token_ids[start + i % (end - start)] for i in range(most)]
        return []

    def _read(self, token_ids: Sequence[int]) -> None:
        for at in range(max(self._num_read, min(SIZES)), len(token_ids)):
            for size in SIZES:
                if at >= size:
                    self._next[tuple(token_ids[at - size : at])] = at
        self._num_read = len(token_ids)
