"""PromptEcho: what the answers to one prompt repeat of it: its text, its log-probabilities, or both."""

from collections.abc import Callable, Sequence

from serving.engine.api import TokenLogprobs
from serving.replica.events import Delta, TokenLogprob


class PromptEcho:
    """Tells the prompt piece by piece, as the engine computes it; the whole text at once if that is all."""

    def __init__(
        self,
        token_ids: Sequence[int],
        pieces: Sequence[str],
        *,
        with_logprobs: bool,
        token_bytes: Callable[[int], bytes] = bytes,
    ) -> None:
        """`pieces` are the texts of the tokens, or nothing if the text is not wanted."""
        self._token_ids = token_ids
        self._pieces = pieces or [""] * len(token_ids)
        self._with_logprobs = with_logprobs
        self._token_bytes = token_bytes
        self._num_told = self._num_chars = 0

    def start(self) -> Delta:
        """What can be told before anything is computed. Nothing comes before a prompt's first token."""
        if not self._with_logprobs:
            return Delta("".join(self._pieces), 0)
        return self._tell([None])

    def push(self, logprobs: Sequence[TokenLogprobs]) -> Delta:
        """The next tokens of the prompt."""
        return self._tell(logprobs)

    def _tell(self, logprobs: Sequence[TokenLogprobs | None]) -> Delta:
        start = self._num_told
        self._num_told += len(logprobs)
        entries = tuple(self._entry(start + i, known) for i, known in enumerate(logprobs))
        return Delta("".join(self._pieces[start : self._num_told]), 0, prompt=entries)

    def _entry(self, index: int, known: TokenLogprobs | None) -> TokenLogprob:
        token_id, offset = self._token_ids[index], self._num_chars
        self._num_chars += len(self._pieces[index])
        token = self._token_bytes(token_id)
        if known is None:
            return TokenLogprob(token, None, offset, token_id=token_id)
        top = tuple((self._token_bytes(other), logprob) for other, logprob in known.top)
        return TokenLogprob(token, known.logprob, offset, top, token_id, known.rank, tuple(i for i, _ in known.top))
