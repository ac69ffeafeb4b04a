"""Pump: what an answer says, told within the callback that brings the news, without waking a task for each token.

What it saves is most of what a token costs here: a future, a task's step and, in a stream, five layers of coroutines.
`TextLane` is for most tokens of most streams, and touches little memory: of a thousand streams, none is in the cache
any more when its turn comes again.
"""

import asyncio
from collections.abc import Callable

import orjson

from serving.gateway.exchange import Exchange
from serving.gateway.formats import AnswerFormat
from serving.gateway.protocol import Connection
from serving.gateway.sse import TextEvent
from serving.gateway.transcript import Said
from serving.replica.inbox import Sink


class Pump:
    """Of one exchange that is open, until it is complete."""

    def __init__(self, exchange: Exchange, tell: Callable[[Said], None], connection: Connection | None = None) -> None:
        """Nothing is told while `connection` is paused: it waits, joined, where it came in."""
        self._exchange, self._tell, self._connection = exchange, tell, connection
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, sink: Sink | None = None) -> None:
        """Raises what ends the answer before. `sink` takes text in place of `tell`."""
        if self._connection is not None:
            self._connection.on_resume = self._go_on
        try:
            self._exchange.listen(self._go_on)
            self._go_on()
            if not self._done.done():
                self._exchange.listen(self._go_on, sink or self._take)
            await self._done
        finally:
            self._exchange.listen(_ignore)
            if self._connection is not None:
                self._connection.on_resume = None

    def _go_on(self) -> None:
        """Tell what is there, as far as the client keeps up."""
        try:
            while not self._is_held and (said := self._exchange.poll()) is not None:
                self._tell(said)
                if self._exchange.is_complete:
                    self._done.set_result(None)
        except Exception as error:  # noqa: BLE001 - it belongs to who waits for the end, not to who brought the news
            self._fail(error)

    def _take(self, choice: int, text: str, num_tokens: int) -> bool:
        """The same for text that comes while nothing waits."""
        if self._is_held:
            return False
        try:
            self._tell(self._exchange.hear_text(choice, text, num_tokens))
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)
        return True

    @property
    def _is_held(self) -> bool:
        return self._done.done() or (self._connection is not None and self._connection.paused)

    def _fail(self, error: Exception) -> None:
        """Nothing is told any more, whatever comes."""
        self._exchange.listen(_ignore)
        if not self._done.done():
            self._done.set_exception(error)


class EventWriter:
    """Writes what is said as events; keeps back the last of them, which leave together with the end of the stream."""

    def __init__(self, exchange: Exchange, answer: AnswerFormat, connection: Connection, opening: bytes = b"") -> None:
        """`opening` leaves together with the first event."""
        self._exchange, self._format, self._connection = exchange, answer, connection
        self._opening = opening
        self.last = b""

    def tell(self, said: Said) -> None:
        part = self._format.said(said)
        if self._exchange.is_complete:
            self.last = self.take_opening() + part + self._format.end(self._exchange.usage)
        elif part:
            self._connection.write(self.take_opening() + part)

    def take_opening(self) -> bytes:
        """Once."""
        opening, self._opening = self._opening, b""
        return opening

    def lane(self) -> Sink | None:
        """A shorter way for text, if there is one."""
        event, see_tokens = self._format.text_event(), self._exchange.see_plain
        if event is None or see_tokens is None or self._exchange.num_choices > 1:
            return None
        return TextLane(self, see_tokens, event, self._connection).take


class TextLane:
    """For text that is content whatever it says, in events that are the same around it."""

    __slots__ = ("__weakref__", "_after", "_before", "_connection", "_see_tokens", "_writer")

    def __init__(
        self, writer: EventWriter, see_tokens: Callable[[int, int], None], event: TextEvent, connection: Connection
    ) -> None:
        self._writer: EventWriter | None = writer
        """Until the opening has left."""
        self._before, self._after, self._connection = event.before, event.after, connection
        self._see_tokens = see_tokens

    def take(self, choice: int, text: str, num_tokens: int) -> bool:
        connection = self._connection
        if connection.paused:
            return False
        if num_tokens:
            self._see_tokens(choice, num_tokens)
        if text:
            part = self._before + orjson.dumps(text) + self._after
            if self._writer is not None:
                part, self._writer = self._writer.take_opening() + part, None
            connection.write(part)
        return True


def _ignore() -> None:
    pass
