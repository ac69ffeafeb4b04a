"""The JSON of answers, as OpenAI writes it: one class per endpoint, for streams and for whole answers alike.

Chunks are put together from bytes (see `sse`), so the order of fields here is the order on the wire.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import orjson

from serving.errors import ServiceError
from serving.gateway import sse
from serving.gateway.chat_json import chat_message, piece_delta
from serving.gateway.choice import Choice
from serving.gateway.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from serving.gateway.speech.pieces import Content, Piece
from serving.gateway.transcript import Said
from serving.replica.events import TokenLogprob
from serving.request import Usage


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every chunk of one answer repeats."""

    answer_id: str
    created: int
    model: str
    include_usage: bool = False
    logprobs: bool = False
    """Whether a whole answer shows log-probabilities; a chunk shows those that it has."""
    num_choices: int = 1
    echo_top: int | None = None
    """Rivals that echoed tokens of the prompt show, if these have log-probabilities."""
    prompt_logprobs: bool = False
    """Whether a whole answer shows those of the prompt by themselves."""


class AnswerFormat(Protocol):
    """How one endpoint writes an answer. `choice` counts the answers to one prompt from 0."""

    opens_at_once: bool
    """Whether the opening leaves when the request is accepted. Else it comes with the first event, as load tools take
    the first chunk that they see for the first token."""

    def opening(self, choice: int = 0) -> bytes: ...

    def said(self, said: Said) -> bytes:
        """The events for this news, that of its end included; empty if there is nothing to tell."""
        ...

    def text_event(self) -> sse.TextEvent | None:
        """The event for text of the only answer, if it is always the same around the text."""
        ...

    def end(self, usage: Usage) -> bytes:
        """What comes after the last answer's end."""
        ...

    def error(self, error: ServiceError) -> bytes:
        """The last event of a stream that fails."""
        ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes: ...


class ChatFormat:
    """chat.completion and chat.completion.chunk."""

    opens_at_once = False

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._before = _chunk_start(head, "chat.completion.chunk")
        self._tail = _chunk_tail(head)
        self._texts = [self._text_event(choice) for choice in range(head.num_choices)]

    def opening(self, choice: int = 0) -> bytes:
        return self._chunk(choice, {"role": "assistant", "content": ""}, None)

    def said(self, said: Said) -> bytes:
        if said.logprobs or said.reason:
            return self._said_with_more(said)
        pieces = said.pieces
        if len(pieces) == 1:
            return self._piece(said.choice, pieces[0])
        return b"".join([self._piece(said.choice, piece) for piece in pieces])

    def text_event(self) -> sse.TextEvent | None:
        return self._texts[0]

    def end(self, usage: Usage) -> bytes:
        return _usage_chunk(self._head, self._before, usage) + sse.DONE

    def error(self, error: ServiceError) -> bytes:
        return sse.error_event(error)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        more = {"prompt_logprobs": prompt_logprobs(choices[0].prompt)} if self._head.prompt_logprobs else {}
        told = [self._choice(*item) for item in enumerate(choices)]
        return _whole(self._head, "chat.completion", told, usage_json(usage), more)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        shown = chat_logprobs(choice.logprobs) if self._head.logprobs else None
        return {"index": index, "message": chat_message(choice), "logprobs": shown, "finish_reason": choice.reason}

    def _piece(self, choice: int, piece: Piece) -> bytes:
        if isinstance(piece, Content):
            return self._texts[choice].fill(piece.text)
        return self._chunk(choice, piece_delta(piece), None)

    def _said_with_more(self, said: Said) -> bytes:
        """Log-probabilities go with the first chunk: some tokens say nothing that is shown."""
        deltas: list[dict[str, Any]] = [piece_delta(piece) for piece in said.pieces]
        if said.logprobs and not deltas:
            deltas = [{}]
        logprobs = [said.logprobs, *((),) * len(deltas)]
        chunks = [self._chunk(said.choice, delta, None, logprobs[i]) for i, delta in enumerate(deltas)]
        if said.reason:
            chunks.append(self._chunk(said.choice, {}, said.reason))
        return b"".join(chunks)

    def _chunk(
        self, index: int, delta: dict[str, Any], reason: str | None, logprobs: Sequence[TokenLogprob] = ()
    ) -> bytes:
        shown = chat_logprobs(logprobs) if logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": shown, "finish_reason": reason}
        return sse.event(self._before + orjson.dumps([choice]) + self._tail)

    def _text_event(self, choice: int) -> sse.TextEvent:
        start = b'[{"index":%d,"delta":{"content":' % choice
        return sse.TextEvent(self._before + start, b'},"logprobs":null,"finish_reason":null}]' + self._tail)


class CompletionFormat:
    """text_completion, whose chunks bear the same name."""

    opens_at_once = False

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._before = _chunk_start(head, "text_completion")
        self._tail = _chunk_tail(head)
        self._texts = [self._text_event(choice) for choice in range(head.num_choices)]

    def opening(self, choice: int = 0) -> bytes:
        return b""

    def said(self, said: Said) -> bytes:
        text = "".join([piece.text for piece in said.pieces if isinstance(piece, Content)])
        logprobs = [*self._echoed(said.prompt), *said.logprobs]
        event = b""
        if logprobs:
            event = self._chunk(said.choice, text, None, logprobs)
        elif text:
            event = self._texts[said.choice].fill(text)
        return event + self._chunk(said.choice, "", said.reason) if said.reason else event

    def text_event(self) -> sse.TextEvent | None:
        return self._texts[0]

    def end(self, usage: Usage) -> bytes:
        return _usage_chunk(self._head, self._before, usage) + sse.DONE

    def error(self, error: ServiceError) -> bytes:
        return sse.error_event(error)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        told = [self._choice(*item) for item in enumerate(choices)]
        return _whole(self._head, "text_completion", told, usage_json(usage))

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        entries = [*self._echoed(choice.prompt), *choice.logprobs]
        shown = completion_logprobs(entries) if self._head.logprobs else None
        more = {"prompt_logprobs": prompt_logprobs(choice.prompt)} if self._head.prompt_logprobs else {}
        return {"index": index, "text": choice.text, "logprobs": shown, "finish_reason": choice.reason, **more}

    def _echoed(self, prompt: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        top = self._head.echo_top
        return [] if top is None else [replace(entry, top=entry.top[:top]) for entry in prompt]

    def _chunk(self, index: int, text: str, reason: str | None, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        shown = completion_logprobs(logprobs) if logprobs else None
        choice = {"index": index, "text": text, "logprobs": shown, "finish_reason": reason}
        return sse.event(self._before + orjson.dumps([choice]) + self._tail)

    def _text_event(self, choice: int) -> sse.TextEvent:
        start = b'[{"index":%d,"text":' % choice
        return sse.TextEvent(self._before + start, b',"logprobs":null,"finish_reason":null}]' + self._tail)


def _chunk_start(head: AnswerHead, kind: str) -> bytes:
    fields = {"id": head.answer_id, "object": kind, "created": head.created, "model": head.model}
    return orjson.dumps(fields)[:-1] + b',"choices":'


def _chunk_tail(head: AnswerHead) -> bytes:
    return b',"usage":null}' if head.include_usage else b"}"


def _usage_chunk(head: AnswerHead, before: bytes, usage: Usage) -> bytes:
    if not head.include_usage:
        return b""
    return sse.event(before + b'[],"usage":' + orjson.dumps(usage_json(usage)) + b"}")


def _whole(
    head: AnswerHead,
    kind: str,
    choices: list[dict[str, Any]],
    usage: dict[str, Any],
    more: Mapping[str, Any] | None = None,
) -> bytes:
    fields = {"id": head.answer_id, "object": kind, "created": head.created, "model": head.model}
    return orjson.dumps({**fields, "choices": choices, "usage": usage, **(more or {})})


def usage_json(usage: Usage) -> dict[str, Any]:
    """Details are told where there are any."""
    details: dict[str, int] = {}
    if usage.reasoning_tokens:
        details["reasoning_tokens"] = usage.reasoning_tokens
    if usage.drafted_tokens:
        details["accepted_prediction_tokens"] = usage.accepted_tokens
        details["rejected_prediction_tokens"] = usage.drafted_tokens - usage.accepted_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **({"completion_tokens_details": details} if details else {}),
    }
