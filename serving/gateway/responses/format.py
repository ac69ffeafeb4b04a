"""ResponsesFormat: an answer as a response object, and as the events that build it up."""

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from serving.errors import ServiceError
from serving.gateway import sse
from serving.gateway.choice import Choice
from serving.gateway.errors import error_fields
from serving.gateway.responses.body import NamedTool, ResponseBody
from serving.gateway.responses.items import call_item, message_item, reasoning_item, text_part
from serving.gateway.speech.json_text import parse
from serving.gateway.speech.pieces import Content, Piece, Reasoning, ToolArguments, ToolStart
from serving.gateway.transcript import Said
from serving.request import Usage

OnDone = Callable[[str, bytes, Choice], None]
"""Called with the id, the whole response and the answer, once it is complete."""


class ResponsesFormat:
    """Of one answer. A stream's last event holds what the plain response would have been."""

    opens_at_once = True

    def __init__(self, body: ResponseBody, on_done: OnDone) -> None:
        self.response_id = _new_id("resp")
        self._body = body
        self._on_done = on_done
        self._created = int(time.time())
        self._number = 0
        self._choice = Choice()
        self._output: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None

    def opening(self, choice: int = 0) -> bytes:
        started = self._response("in_progress", None)
        return self._event("response.created", response=started) + self._event("response.in_progress", response=started)

    def said(self, said: Said) -> bytes:
        self._choice.see(said)
        events = [self._piece(piece) for piece in said.pieces]
        if said.reason:
            events.append(self._close_item(_status(self._choice)))
        return b"".join(events)

    def text_event(self) -> None:
        return None

    def end(self, usage: Usage) -> bytes:
        status = _status(self._choice)
        response = self._response(status, usage)
        self._on_done(self.response_id, orjson.dumps(response), self._choice)
        return self._event(f"response.{status}", response=response)

    def error(self, error: ServiceError) -> bytes:
        response = self._response("failed", None)
        fields = error_fields(error)
        response["error"] = {"code": fields["code"], "message": fields["message"]}
        return self._event("response.failed", response=response)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        (self._choice,) = choices
        for piece in _pieces(self._choice):
            self._piece(piece)
        self._close_item(_status(self._choice))
        response = orjson.dumps(self._response(_status(self._choice), usage))
        self._on_done(self.response_id, response, self._choice)
        return response

    def _piece(self, piece: Piece) -> bytes:
        match piece:
            case Content(text):
                return self._ensure_open("message") + self._delta("response.output_text", text)
            case Reasoning(text):
                return self._ensure_open("reasoning") + self._delta("response.reasoning_text", text)
            case ToolStart(_, call_id, name):
                return self._close_item() + self._open_item(_OpenItem("function_call", call_id, name))
            case ToolArguments(_, text):
                return self._delta("response.function_call_arguments", text)

    def _delta(self, name: str, text: str) -> bytes:
        item = self._open
        assert item is not None, "text belongs to an item"
        item.parts.append(text)
        return self._event(f"{name}.delta", **self._place(item), delta=text, **item.logprobs())

    def _ensure_open(self, kind: str) -> bytes:
        if self._open is not None and self._open.kind == kind:
            return b""
        return self._close_item() + self._open_item(_OpenItem(kind))

    def _open_item(self, item: "_OpenItem") -> bytes:
        self._open = item
        added = self._event(
            "response.output_item.added", output_index=len(self._output), item=item.json("in_progress", begun=False)
        )
        if item.kind != "message":
            return added
        return added + self._event("response.content_part.added", **self._place(item), part=text_part(""))

    def _close_item(self, status: str = "completed") -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        events = self._event(f"{item.event}.done", **self._place(item), **item.done())
        if item.kind == "message":
            events += self._event("response.content_part.done", **self._place(item), part=text_part(item.text))
        done = item.json(item.end_status(status))
        events += self._event("response.output_item.done", output_index=len(self._output), item=done)
        self._output.append(done)
        return events

    def _place(self, item: "_OpenItem") -> dict[str, Any]:
        part = {} if item.kind == "function_call" else {"content_index": 0}
        return {"item_id": item.item_id, "output_index": len(self._output), **part}

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\n" + sse.event(orjson.dumps(event))

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        body = self._body
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model,
            "output": self._output if usage is not None else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)}
            if body.text and body.text.format
            else {"format": {"type": "text"}},
            "tool_choice": named.model_dump() if isinstance(named := body.tool_choice, NamedTool) else named or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": body.user,
            "metadata": body.metadata or {},
        }


class _OpenItem:
    """The output item that is being told."""

    def __init__(self, kind: str, call_id: str = "", name: str = "") -> None:
        self.kind, self.call_id, self.name = kind, call_id, name
        prefixes = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
        events = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
        self.item_id = _new_id(prefixes[kind])
        self.event = f"response.{events[kind]}"
        self.parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self.kind == "message" else {}

    def done(self) -> dict[str, Any]:
        if self.kind == "function_call":
            return {"name": self.name, "arguments": self.text}
        return {"text": self.text, **self.logprobs()}

    def json(self, status: str, *, begun: bool = True) -> dict[str, Any]:
        match self.kind:
            case "message":
                return message_item(self.item_id, self.text if begun else None, status)
            case "reasoning":
                return reasoning_item(self.item_id, self.text, status)
            case _:
                return call_item(self.item_id, self.call_id, self.name, self.text, status)

    def end_status(self, answer_status: str) -> str:
        """A call is whole when its arguments are, wherever the answer ends."""
        if self.kind != "function_call":
            return answer_status
        return "incomplete" if parse(self.text) is None else "completed"


def _pieces(choice: Choice) -> list[Piece]:
    """In the order in which a model says them."""
    pieces: list[Piece] = []
    if choice.thoughts:
        pieces.append(Reasoning(choice.reasoning))
    if choice.text:
        pieces.append(Content(choice.text))
    for index, call in enumerate(choice.calls):
        pieces += [ToolStart(index, call.call_id, call.name), ToolArguments(index, call.arguments)]
    return pieces


def _status(choice: Choice) -> str:
    return "incomplete" if choice.reason == "length" else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
