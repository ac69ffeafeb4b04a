"""Answer: the text side of one running request. Token ids go in, text that a client may see comes out."""

from collections.abc import Callable
from dataclasses import dataclass

from serving.engine.api import SequenceOutput, TokenLogprobs
from serving.engine.tokenizer import Detokenizer, StopStrings
from serving.replica.alignment import Alignment
from serving.replica.events import TokenLogprob
from serving.replica.thought_count import ThoughtCount
from serving.request import FinishReason, Usage


@dataclass(frozen=True, slots=True)
class AnswerNews:
    """What one step added. `reason` is set when the answer is complete, `abort` when the engine must be told so."""

    text: str
    num_tokens: int
    reason: FinishReason | None = None
    abort: bool = False
    logprobs: tuple[TokenLogprob, ...] = ()


class Answer:
    """Owns the detokenizer and the stop strings of one request, and counts its tokens."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopStrings,
        stop_ids: frozenset[int],
        prompt_tokens: int,
        *,
        min_tokens: int = 0,
        token_bytes: Callable[[int], bytes] = bytes,
        num_echoed: int = 0,
        prompt_only: bool = False,
        thoughts: ThoughtCount | None = None,
    ) -> None:
        """`token_bytes` is asked only when the engine sends log-probabilities. `num_echoed` characters of the prompt
        come before the answer; with `prompt_only` it has no tokens, though the engine makes one."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_ids = stop_ids
        self._prompt_tokens = prompt_tokens
        self._min_tokens = min_tokens
        self._prompt_only = prompt_only
        self._thoughts = thoughts
        self._alignment = Alignment(token_bytes, num_echoed)
        self._completion_tokens = 0
        self._cached_tokens = self._drafted_tokens = self._accepted_tokens = 0

    @property
    def usage(self) -> Usage:
        return Usage(
            self._prompt_tokens,
            self._completion_tokens,
            self._cached_tokens,
            self._drafted_tokens,
            self._accepted_tokens,
            0 if self._thoughts is None else self._thoughts.num_tokens,
        )

    def push_tokens(self, token_ids: tuple[int, ...]) -> AnswerNews:
        """One step's tokens, the usual case: the engine tells nothing else."""
        return self._push(token_ids, ())

    def push(self, output: SequenceOutput) -> AnswerNews:
        """One step's tokens. A stop string ends the answer before the engine knows; later steps are not pushed."""
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        self._drafted_tokens, self._accepted_tokens = output.drafted_tokens, output.accepted_tokens
        return self._push(output.token_ids, output.logprobs, output.finish_reason)

    def _push(
        self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], reason: FinishReason | None = None
    ) -> AnswerNews:
        if self._prompt_only:
            return AnswerNews("", 0, FinishReason.LENGTH if reason is FinishReason.STOP else reason)
        before = self._completion_tokens
        text, hit = self._push_ids(token_ids, logprobs, reason)
        num_tokens = self._completion_tokens - before
        if hit:
            return AnswerNews(text, num_tokens, FinishReason.STOP, reason is None, self._alignment.cut(len(text)))
        if reason is None:
            return AnswerNews(text, num_tokens, logprobs=self._alignment.show(len(text)))
        rest, hit = self._flush()
        text += rest
        shown = self._alignment.cut(len(text)) if hit else self._alignment.end()
        return AnswerNews(text, num_tokens, FinishReason.STOP if hit else reason, logprobs=shown)

    def _push_ids(
        self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], reason: FinishReason | None
    ) -> tuple[str, bool]:
        """Token by token, so that text and count do not depend on how many tokens a step brings."""
        parts: list[str] = []
        for index, token_id in enumerate(token_ids):
            self._completion_tokens += 1
            if reason is FinishReason.STOP and index == len(token_ids) - 1 and token_id in self._stop_ids:
                break  # the token that says stop is counted but not shown
            text = self._detokenizer.push((token_id,))
            if self._thoughts is not None:
                self._thoughts.see(text)
            if logprobs:
                self._alignment.add(token_id, logprobs[index], len(text))
            shown, hit = self._until_stop(text)
            parts.append(shown)
            if hit:
                return "".join(parts), True
        return "".join(parts), False

    def _until_stop(self, text: str) -> tuple[str, bool]:
        """Stop strings count once the answer has more than `min_tokens` tokens, as in vLLM."""
        return (text, False) if self._completion_tokens <= self._min_tokens else self._stops.push(text)

    def _flush(self) -> tuple[str, bool]:
        """Text that was held back for a stop string or a cut character that never came."""
        text, hit = self._stops.push(self._detokenizer.finish())
        return (text, True) if hit else (text + self._stops.finish(), False)
