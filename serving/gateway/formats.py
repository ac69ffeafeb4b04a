"""The JSON of answers, as OpenAI writes it: one class per endpoint, for streams and for whole answers alike.

Chunks are put together from bytes (see `sse`), so the order of fields here is the order on the wire.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from serving.gateway import sse
from serving.gateway.logprobs import chat_logprobs, completion_logprobs
from serving.replica.events import TokenLogprob
from serving.request import FinishReason, Usage


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every chunk of one answer repeats."""

    answer_id: str
    created: int
    model: str
    include_usage: bool = False
    logprobs: bool = False
    """Whether a whole answer shows log-probabilities; a chunk shows those that it has."""


class AnswerFormat(Protocol):
    """How one endpoint writes an answer."""

    def opening(self) -> bytes: ...

    def text(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes: ...

    def closing(self, reason: FinishReason) -> bytes: ...

    def usage(self, usage: Usage) -> bytes:
        """The chunk without choices that `include_usage` asks for; empty when it was not asked."""
        ...

    def whole(self, text: str, reason: FinishReason, usage: Usage, logprobs: Sequence[TokenLogprob] = ()) -> bytes: ...


class ChatFormat:
    """chat.completion and chat.completion.chunk."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._before = _chunk_start(head, "chat.completion.chunk")
        self._tail = _chunk_tail(head)
        self._text = sse.TextEvent(
            self._before + b'[{"index":0,"delta":{"content":', b'},"logprobs":null,"finish_reason":null}]' + self._tail
        )

    def opening(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def text(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        return self._chunk({"content": text}, None, logprobs) if logprobs else self._text.fill(text)

    def closing(self, reason: FinishReason) -> bytes:
        return self._chunk({}, reason.value)

    def usage(self, usage: Usage) -> bytes:
        return _usage_chunk(self._head, self._before, usage)

    def whole(self, text: str, reason: FinishReason, usage: Usage, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        message = {"role": "assistant", "content": text, "refusal": None}
        shown = chat_logprobs(logprobs) if self._head.logprobs else None
        choice = {"index": 0, "message": message, "logprobs": shown, "finish_reason": reason.value}
        return _whole(self._head, "chat.completion", choice, usage)

    def _chunk(self, delta: dict[str, str], reason: str | None, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        shown = chat_logprobs(logprobs) if logprobs else None
        choice = {"index": 0, "delta": delta, "logprobs": shown, "finish_reason": reason}
        return sse.event(self._before + orjson.dumps([choice]) + self._tail)


class CompletionFormat:
    """text_completion, whose chunks bear the same name."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._before = _chunk_start(head, "text_completion")
        self._tail = _chunk_tail(head)
        self._text = sse.TextEvent(
            self._before + b'[{"index":0,"text":', b',"logprobs":null,"finish_reason":null}]' + self._tail
        )

    def opening(self) -> bytes:
        return b""

    def text(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        return self._chunk(text, None, logprobs) if logprobs else self._text.fill(text)

    def closing(self, reason: FinishReason) -> bytes:
        return self._chunk("", reason.value)

    def usage(self, usage: Usage) -> bytes:
        return _usage_chunk(self._head, self._before, usage)

    def whole(self, text: str, reason: FinishReason, usage: Usage, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        shown = completion_logprobs(logprobs) if self._head.logprobs else None
        choice = {"index": 0, "text": text, "logprobs": shown, "finish_reason": reason.value}
        return _whole(self._head, "text_completion", choice, usage)

    def _chunk(self, text: str, reason: str | None, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        shown = completion_logprobs(logprobs) if logprobs else None
        choice = {"index": 0, "text": text, "logprobs": shown, "finish_reason": reason}
        return sse.event(self._before + orjson.dumps([choice]) + self._tail)


def _chunk_start(head: AnswerHead, kind: str) -> bytes:
    fields = {"id": head.answer_id, "object": kind, "created": head.created, "model": head.model}
    return orjson.dumps(fields)[:-1] + b',"choices":'


def _chunk_tail(head: AnswerHead) -> bytes:
    return b',"usage":null}' if head.include_usage else b"}"


def _usage_chunk(head: AnswerHead, before: bytes, usage: Usage) -> bytes:
    if not head.include_usage:
        return b""
    return sse.event(before + b'[],"usage":' + orjson.dumps(_usage_fields(usage)) + b"}")


def _whole(head: AnswerHead, kind: str, choice: dict[str, Any], usage: Usage) -> bytes:
    fields = {"id": head.answer_id, "object": kind, "created": head.created, "model": head.model}
    return orjson.dumps({**fields, "choices": [choice], "usage": _usage_fields(usage)})


def _usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
