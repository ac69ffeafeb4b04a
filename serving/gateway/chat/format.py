"""ShortFormat: an answer as events `{"type": ...}` that need no nesting, and as one small object."""

from collections.abc import Sequence
from typing import Any

import orjson

from serving.errors import ServiceError
from serving.gateway import sse
from serving.gateway.chat_json import tool_call
from serving.gateway.choice import Choice
from serving.gateway.errors import error_fields
from serving.gateway.formats import usage_json
from serving.gateway.speech.pieces import Content, Piece, Reasoning, ToolArguments, ToolStart
from serving.gateway.transcript import Said
from serving.request import Usage

Event = dict[str, Any]
TEXT = sse.TextEvent(b'{"type":"text","text":', b"}")


class ShortFormat:
    """Over SSE: text, reasoning, tool_call and tool_arguments as they come, then end, then usage."""

    opens_at_once = False

    def opening(self, choice: int = 0) -> bytes:
        return b""

    def said(self, said: Said) -> bytes:
        return b"".join(map(_sse, said_events(said)))

    def text_event(self) -> sse.TextEvent:
        return TEXT

    def end(self, usage: Usage) -> bytes:
        return _sse(usage_event(usage))

    def error(self, error: ServiceError) -> bytes:
        return _sse(error_event(error))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        (choice,) = choices
        answer: dict[str, Any] = {"text": choice.text}
        if choice.thoughts:
            answer["reasoning"] = choice.reasoning
        if choice.calls:
            answer["tool_calls"] = [tool_call(call) for call in choice.calls]
        return orjson.dumps({**answer, "finish_reason": choice.reason, "usage": usage_json(usage)})


def said_events(said: Said) -> list[Event]:
    events = [_piece_event(piece) for piece in said.pieces]
    return [*events, end_event(said.reason)] if said.reason else events


def end_event(reason: str) -> Event:
    return {"type": "end", "finish_reason": reason}


def usage_event(usage: Usage, ignored: Sequence[str] = ()) -> Event:
    """`ignored` are fields that were without effect, where no header can say so."""
    return {"type": "usage", **usage_json(usage), **({"ignored": list(ignored)} if ignored else {})}


def error_event(error: ServiceError) -> Event:
    return {"type": "error", "error": error_fields(error)}


def _piece_event(piece: Piece) -> Event:
    match piece:
        case Content(text):
            return {"type": "text", "text": text}
        case Reasoning(text):
            return {"type": "reasoning", "text": text}
        case ToolStart(index, call_id, name):
            return {"type": "tool_call", "index": index, "id": call_id, "name": name}
        case ToolArguments(index, text):
            return {"type": "tool_arguments", "index": index, "text": text}


def _sse(event: Event) -> bytes:
    return sse.event(orjson.dumps(event))
