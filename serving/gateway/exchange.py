"""Exchange: one request and all that is said in answer to it, whatever the protocol. `CallExchange` is one call of the
replica; `server_tools.ToolExchange` may be several."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from serving.gateway.call import Call, total_usage
from serving.gateway.speech.speech import SpeechPlan
from serving.gateway.transcript import Said, Transcript
from serving.replica.inbox import Sink
from serving.request import Usage


class Exchange(Protocol):
    """`open`, `listen` and `poll` until it is complete, and `close` whatever happened."""

    @property
    def num_choices(self) -> int: ...

    @property
    def prompt_tokens(self) -> int:
        """Of all that was asked so far, once it is open."""
        ...

    @property
    def is_complete(self) -> bool:
        """Every choice has told its end."""
        ...

    @property
    def usage(self) -> Usage:
        """Of all of it, once it is complete."""
        ...

    async def open(self) -> None:
        """Wait until the replica accepts. Raises ServiceError."""
        ...

    def listen(self, on_news: Callable[[], None], sink: Sink | None = None) -> None:
        """From now on `on_news` is called when there is something for `poll`. `sink` gets text before which nothing
        waits, as it comes; of what it takes it must ask `hear_text` what it says, or tell `see_plain` if there is
        such."""
        ...

    def poll(self) -> Said | None:
        """What is said next, if it is there. Raises ServiceError when the answer fails on its way."""
        ...

    def hear_text(self, choice: int, text: str, num_tokens: int) -> Said: ...

    @property
    def see_plain(self) -> Callable[[int, int], None] | None:
        """Where all text is content as it comes: to be told of a choice's tokens that a sink has taken."""
        ...

    def close(self) -> None:
        """Frees what is still held. May be called twice."""
        ...


class CallExchange:
    """What one call says, as a plan reads it."""

    def __init__(self, call: Call, plan: SpeechPlan = SpeechPlan()) -> None:  # noqa: B008 - frozen
        self._call = call
        self._plan = plan
        self._transcript = Transcript(plan, call.num_choices)

    @property
    def num_choices(self) -> int:
        return self._call.num_choices

    @property
    def prompt_tokens(self) -> int:
        return self._call.prompt_tokens

    @property
    def is_complete(self) -> bool:
        return self._transcript.is_complete

    @property
    def usage(self) -> Usage:
        return total_usage(self._transcript.finished)

    async def open(self) -> None:
        await self._call.open()
        if self._call.in_thought:
            self._transcript = Transcript(self._plan, self._call.num_choices, in_thought=True)

    def listen(self, on_news: Callable[[], None], sink: Sink | None = None) -> None:
        self._call.listen(on_news, sink)

    @property
    def see_plain(self) -> Callable[[int, int], None] | None:
        return self._call.see_tokens if self._plan.is_plain else None

    def hear_text(self, choice: int, text: str, num_tokens: int) -> Said:
        if num_tokens:
            self._call.see_tokens(choice, num_tokens)
        return self._transcript.hear_text(choice, text, num_tokens)

    def poll(self) -> Said | None:
        event = self._call.poll()
        return None if event is None else self._transcript.hear(event)

    def close(self) -> None:
        self._call.close()


async def each_said(exchange: Exchange) -> AsyncIterator[Said]:
    """For readers that wait between two. Raises ServiceError when the answer fails on its way."""
    news = asyncio.Event()
    exchange.listen(news.set)
    while not exchange.is_complete:
        news.clear()
        while (said := exchange.poll()) is not None:
            yield said
        if not exchange.is_complete:
            await news.wait()
