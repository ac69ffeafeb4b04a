"""ToolExchange: an answer during which the gateway runs the tools that the model calls.

Each round is one call of the replica. When it ends in calls of the server's tools and no others, these are run, their
results follow the model's words in the conversation, and the next round goes on from there: its prompt begins like the
one before, so that the replica finds most of it in its cache. The client sees one answer, without the server's calls.

Where the model calls a tool of the client too, the client's calls end the answer, as ever: the conversation goes on
with their results, and the model asks for the server's again if it still wants them.
"""

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from serving.gateway.call import Call, Services
from serving.gateway.choice import Choice, ToolCall
from serving.gateway.exchange import CallExchange
from serving.gateway.message import Message
from serving.gateway.schema import ChatBody
from serving.gateway.server_tools.config import ServerTool
from serving.gateway.speech.pieces import Content, Piece, Reasoning, ToolArguments, ToolStart
from serving.gateway.transcript import Said
from serving.request import Usage

COMPLETE = frozenset({"tool_calls", "stop"})
"""Reasons to end with which calls are whole; a call that the client forced by name ends with `stop`."""
LENGTH = "length"
BETWEEN = "\n\n"
"""Stands between what is said in two rounds."""


class ToolExchange:
    """Of one choice."""

    num_choices = 1

    def __init__(
        self,
        services: Services,
        body: ChatBody,
        request_id: str,
        tools: Mapping[str, ServerTool],
    ) -> None:
        """`tools` are those of the server that the body offers."""
        self._services, self._request_id = services, request_id
        self._body, self._tools = body, tools
        self._rounds_left = services.tools.max_rounds
        self._filter = SaidFilter(frozenset(tools))
        self._usage = Usage()
        self._exchanges = [self._new_exchange(body, admitted=False)]
        self.is_complete = False

    @property
    def prompt_tokens(self) -> int:
        return self._usage.prompt_tokens + self._exchanges[-1].prompt_tokens

    @property
    def usage(self) -> Usage:
        return self._usage

    async def open(self) -> None:
        await self._exchanges[0].open()

    async def next(self) -> Said:
        said = self._filter.pass_on(await self._exchanges[-1].next())
        if said.reason is None:
            return said
        self._usage = _sum(self._usage, self._exchanges[-1].usage)
        calls = self._filter.round.calls
        if not calls or self._filter.num_shown_now or said.reason not in COMPLETE:
            self.is_complete = True
            return said
        return await self._go_on(said)

    def close(self) -> None:
        """The first one holds the place in the gateway."""
        for exchange in self._exchanges:
            exchange.close()

    async def _go_on(self, said: Said) -> Said:
        body = next_body(self._body, self._usage, self._rounds_left)
        if body is None:
            self.is_complete = True
            return said._replace(reason=LENGTH)
        calls = self._filter.round.calls
        results = await asyncio.gather(
            *(self._services.tool_caller.run(self._tools[call.name], call, self._request_id) for call in calls)
        )
        self._rounds_left -= 1
        self._body = with_results(body, self._filter.round, results)
        self._filter.next_round()
        exchange = self._new_exchange(self._body, admitted=True)
        self._exchanges[1:] = [exchange]
        await exchange.open()
        return said._replace(reason=None)

    def _new_exchange(self, body: ChatBody, *, admitted: bool) -> CallExchange:
        call = Call(self._services, body.to_request(self._request_id), admitted=admitted)
        return CallExchange(call, body.speech_plan(self._services.replica.status))


class SaidFilter:
    """What the client sees of each round: all but the server's calls. Keeps what the round said, for the next one."""

    def __init__(self, server_names: frozenset[str]) -> None:
        self._server_names = server_names
        self._shown: dict[int, int] = {}
        """The client's calls of this round: their number there, and for the client."""
        self._num_shown = 0
        self._kinds: set[type[Piece]] = set()
        """Of text that earlier rounds have told, and this one has not."""
        self._told: set[type[Piece]] = set()
        self._places: dict[int, ToolCall] = {}
        self.round = Choice()
        """The words of this round, and the server's calls."""

    @property
    def num_shown_now(self) -> int:
        """Calls of the client's tools in this round."""
        return len(self._shown)

    def pass_on(self, said: Said) -> Said:
        pieces = [shown for piece in said.pieces if (shown := self._see(piece)) is not None]
        return said._replace(pieces=pieces)

    def next_round(self) -> None:
        self._shown, self._places, self.round = {}, {}, Choice()
        self._kinds = set(self._told)

    def _see(self, piece: Piece) -> Piece | None:
        match piece:
            case Content(text):
                self.round.parts.append(text)
                return Content(self._parted(piece) + text)
            case Reasoning(text):
                self.round.thoughts.append(text)
                return Reasoning(self._parted(piece) + text)
            case ToolStart(index, call_id, name):
                return self._see_call(index, call_id, name)
            case ToolArguments(index, text):
                if index in self._shown:
                    return ToolArguments(self._shown[index], text)
                self._places[index].parts.append(text)
                return None

    def _see_call(self, index: int, call_id: str, name: str) -> Piece | None:
        if name in self._server_names:
            self._places[index] = call = ToolCall(call_id, name)
            self.round.calls.append(call)
            return None
        self._shown[index] = self._num_shown
        self._num_shown += 1
        return ToolStart(self._shown[index], call_id, name)

    def _parted(self, piece: Piece) -> str:
        self._told.add(type(piece))
        if type(piece) not in self._kinds:
            return ""
        self._kinds.discard(type(piece))
        return BETWEEN


def next_body(body: ChatBody, usage: Usage, rounds_left: int) -> ChatBody | None:
    """The next round's, without its messages: what is left of the limits, and no call that is forced again; in the last
    round nothing can be called. None if no token is left."""
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    left = None if limit is None else limit - usage.completion_tokens
    if left is not None and left < 1:
        return None
    choice = "none" if rounds_left <= 1 else None
    changes = {"max_tokens": left, "max_completion_tokens": None, "min_tokens": None, "deadline_ms": None}
    return body.model_copy(update={**changes, "tool_choice": choice})


def with_results(body: ChatBody, said: Choice, results: Sequence[str]) -> ChatBody:
    """Behind what the model said come the results of its calls."""
    calls = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": _object(call)}}
        for call in said.calls
    ]
    spoken: dict[str, Any] = {"role": "assistant", "content": said.text or None, "tool_calls": calls}
    if said.thoughts:
        spoken["reasoning_content"] = said.reasoning
    told = [
        {"role": "tool", "tool_call_id": call.call_id, "content": result}
        for call, result in zip(said.calls, results, strict=True)
    ]
    more = [Message.model_validate(message) for message in (spoken, *told)]
    return body.model_copy(update={"messages": [*body.messages, *more]})


def _object(call: ToolCall) -> dict[str, Any]:
    """Templates take an object; the result says what was wrong with anything else."""
    try:
        arguments = orjson.loads(call.arguments or "{}")
    except orjson.JSONDecodeError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _sum(first: Usage, second: Usage) -> Usage:
    names = (field.name for field in dataclasses.fields(Usage))
    return Usage(**{name: getattr(first, name) + getattr(second, name) for name in names})
