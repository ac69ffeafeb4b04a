"""Answer: the text side of one running request. Token ids go in, text that a client may see comes out."""

from dataclasses import dataclass

from serving.engine.api import SequenceOutput
from serving.engine.tokenizer import Detokenizer, StopStrings
from serving.request import FinishReason, Usage


@dataclass(frozen=True, slots=True)
class AnswerNews:
    """What one step added. `reason` is set when the answer is complete, `abort` when the engine must be told so."""

    text: str
    num_tokens: int
    reason: FinishReason | None = None
    abort: bool = False


class Answer:
    """Owns the detokenizer and the stop strings of one request, and counts its tokens."""

    def __init__(
        self, detokenizer: Detokenizer, stops: StopStrings, stop_ids: frozenset[int], prompt_tokens: int
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_ids = stop_ids
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self._cached_tokens = 0

    @property
    def usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._completion_tokens, self._cached_tokens)

    def push(self, output: SequenceOutput) -> AnswerNews:
        """One step's tokens. A stop string ends the answer before the engine knows; later steps are not pushed."""
        before = self._completion_tokens
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        text, hit = self._push_ids(output.token_ids, output.finish_reason)
        num_tokens = self._completion_tokens - before
        if hit:
            return AnswerNews(text, num_tokens, FinishReason.STOP, abort=output.finish_reason is None)
        if output.finish_reason is None:
            return AnswerNews(text, num_tokens)
        rest, hit = self._flush()
        return AnswerNews(text + rest, num_tokens, FinishReason.STOP if hit else output.finish_reason)

    def _push_ids(self, token_ids: tuple[int, ...], reason: FinishReason | None) -> tuple[str, bool]:
        """Token by token, so that text and count do not depend on how many tokens a step brings."""
        parts: list[str] = []
        for index, token_id in enumerate(token_ids):
            self._completion_tokens += 1
            if reason is FinishReason.STOP and index == len(token_ids) - 1 and token_id in self._stop_ids:
                break  # the token that says stop is counted but not shown
            text, hit = self._stops.push(self._detokenizer.push((token_id,)))
            parts.append(text)
            if hit:
                return "".join(parts), True
        return "".join(parts), False

    def _flush(self) -> tuple[str, bool]:
        """Text that was held back for a stop string or a cut character that never came."""
        text, hit = self._stops.push(self._detokenizer.finish())
        return (text, True) if hit else (text + self._stops.finish(), False)
