"""Rounds: one answer during which the gateway runs the tools that the model calls.

When a round ends in calls of the server's tools and no others, these are run, their results follow the model's words in
the conversation, and a call of the replica goes on from there: its prompt begins like the one before, so that the
replica finds most of it in its cache. The client sees one answer, without the server's calls.

Where the model calls a tool of the client too, the client's calls end the answer, as ever: the conversation goes on
with their results, and the model asks for the server's again if it still wants them.
"""

import asyncio
import contextvars
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serving.gateway.call import Call, Services
from serving.gateway.choice import Choice, ToolCall
from serving.gateway.exchange import CallExchange
from serving.gateway.message import Message
from serving.gateway.schema import ChatBody
from serving.gateway.server_tools.config import ServerTool
from serving.gateway.server_tools.said_filter import SaidFilter
from serving.gateway.transcript import Said
from serving.replica.inbox import Sink
from serving.request import Usage, choice_seed

COMPLETE = frozenset({"tool_calls", "stop"})
"""Reasons to end with which calls are run; a call that the client forced by name ends with `stop`."""
LENGTH = "length"


class Rounds:
    """Of one answer among those to one prompt. Its first round is said by a call for all of them, which `hear` is told;
    the others by calls of its own, which it polls itself."""

    def __init__(
        self, services: Services, body: ChatBody, request_id: str, tools: Mapping[str, ServerTool], choice: int
    ) -> None:
        self._services, self._request_id, self._tools, self._choice = services, request_id, tools, choice
        self._body = body.model_copy(update={"n": None, "seed": choice_seed(body.seed, choice)})
        self._rounds_left = services.tools.max_rounds
        self._filter = SaidFilter(frozenset(tools))
        self._context = contextvars.copy_context()
        """The request's: news come in that of whoever brings them."""
        self.own: CallExchange | None = None
        """The newest call of its own, once it is open."""
        self._change: asyncio.Task[None] | None = None
        """To the next round."""
        self._on_news: Callable[[], None] = _nobody_listens
        self._sink: Sink | None = None
        self.usage = Usage()
        """Of its own calls that have ended."""
        self.prompt_tokens = 0
        """Of its own calls."""
        self.is_complete = False

    def listen(self, on_news: Callable[[], None], sink: Sink | None) -> None:
        """As an exchange does."""
        self._on_news, self._sink = on_news, sink
        if self._change is None:
            self._listen_to_own()

    def poll(self) -> Said | None:
        """Of its own calls. Raises ServiceError."""
        if self._change is not None:
            if not self._change.done():
                return None
            change, self._change = self._change, None
            change.result()
            self._listen_to_own()
        said = None if self.own is None else self.own.poll()
        return None if said is None else self.hear(said)

    def hear(self, said: Said) -> Said:
        """What the client is told of it. The end of a round may be the beginning of another."""
        said = self._filter.pass_on(said)._replace(choice=self._choice)
        if said.reason is None:
            return said
        assert said.usage is not None, "the end brings its usage"
        if self.own is not None:
            self.usage += said.usage
        calls = self._filter.round.calls
        if not calls or said.is_cut or self._filter.num_shown_now or said.reason not in COMPLETE:
            self.is_complete = True
            return said
        body = next_body(self._body, said.usage.completion_tokens, self._rounds_left)
        if body is None:
            self.is_complete = True
            return said._replace(reason=LENGTH)
        self._change = asyncio.create_task(self._go_on(body, calls), name="tools", context=self._context)
        self._change.add_done_callback(self._see_change)
        return said._replace(reason=None)

    def close(self) -> None:
        if self._change is not None:
            self._change.cancel()
        if self.own is not None:
            self.own.close()

    async def _go_on(self, body: ChatBody, calls: Sequence[ToolCall]) -> None:
        run = self._services.tool_caller.run
        results = await asyncio.gather(*(run(self._tools[call.name], call, self._request_id) for call in calls))
        self._rounds_left -= 1
        self._body = with_results(body, self._filter.round, results)
        self._filter.next_round()
        call = Call(self._services, self._body.to_request(self._request_id), admitted=True)
        exchange = CallExchange(call, self._body.speech_plan(self._services.replica.status))
        try:
            await exchange.open()
        except BaseException:  # cancelled, too
            exchange.close()
            raise
        self.own = exchange
        self.prompt_tokens += exchange.prompt_tokens

    def _see_change(self, change: "asyncio.Task[None]") -> None:
        if not change.cancelled():
            change.exception()  # is raised by `poll`, if anybody still asks
            self._on_news()

    def _listen_to_own(self) -> None:
        if self.own is not None:
            self.own.listen(self._on_news, self._sink and self._take)

    def _take(self, _: int, text: str, num_tokens: int) -> bool:
        assert self._sink is not None, "it was asked for"
        return self._sink(self._choice, text, num_tokens)


def next_body(body: ChatBody, num_tokens: int, rounds_left: int) -> ChatBody | None:
    """The next round's after one of so many tokens, without its messages: what is left of the limits, and no call that
    is forced again; in the last round nothing can be called. None if no token is left."""
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    left = None if limit is None else limit - num_tokens
    if left is not None and left < 1:
        return None
    choice = "none" if rounds_left <= 1 else None
    changes = {"max_tokens": left, "max_completion_tokens": None, "min_tokens": None, "deadline_ms": None}
    return body.model_copy(update={**changes, "tool_choice": choice})


def with_results(body: ChatBody, said: Choice, results: Sequence[str]) -> ChatBody:
    """Behind what the model said come the results of its calls."""
    calls = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
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


def _nobody_listens() -> None:
    pass
