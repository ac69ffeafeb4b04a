"""Alignment: which tokens' log-probabilities may be shown, so that they say the same as the text that is shown.

A token is shown with the last character of its text: not while a stop string holds that back, nor while a later token
has yet to complete the character. What a stop string cuts away is never shown.
"""

from collections import deque
from collections.abc import Callable

from serving.engine.api import TokenLogprobs
from serving.replica.events import TokenLogprob


class Alignment:
    """Of one answer. Offsets are in characters of the answer's text, which `start` of an echoed prompt come before."""

    def __init__(self, token_bytes: Callable[[int], bytes], start: int = 0) -> None:
        self._token_bytes = token_bytes
        self._pending: deque[tuple[TokenLogprob, int]] = deque()  # with the number of characters of its text
        self._decoded = self._shown = start

    def add(self, token_id: int, logprobs: TokenLogprobs, num_chars: int) -> None:
        """The next token, whose text has `num_chars` characters: none if it only begins one, or is special."""
        top = tuple((self._token_bytes(other), logprob) for other, logprob in logprobs.top)
        entry = TokenLogprob(self._token_bytes(token_id), logprobs.logprob, self._decoded, top)
        self._pending.append((entry, num_chars))
        self._decoded += num_chars

    def show(self, num_chars: int) -> tuple[TokenLogprob, ...]:
        """So many more characters are shown; returns the tokens that are complete with them."""
        self._shown += num_chars
        ends = [entry.text_offset + chars if chars else None for entry, chars in self._pending]
        complete = [index for index, end in enumerate(ends) if end is not None and end <= self._shown]
        return self._take(complete[-1] + 1 if complete else 0)

    def cut(self, num_chars: int) -> tuple[TokenLogprob, ...]:
        """So many more are shown, and the rest is cut away; returns the tokens that begin before the cut."""
        self._shown += num_chars
        return self._take(sum(entry.text_offset < self._shown for entry, _ in self._pending))

    def end(self) -> tuple[TokenLogprob, ...]:
        """All that is left: everything is shown."""
        return self._take(len(self._pending))

    def _take(self, count: int) -> tuple[TokenLogprob, ...]:
        return tuple(self._pending.popleft()[0] for _ in range(count))
