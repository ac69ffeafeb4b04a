"""Pump: the middle of a stream, written within the callback that brings the news, without waking a task for each token.

What it saves is most of what a token costs here: a future, a task's step and five layers of coroutines.
"""

import asyncio

from serving.gateway.exchange import CallExchange
from serving.gateway.formats import AnswerFormat
from serving.gateway.keep_alive import KeepAlive
from serving.gateway.protocol import PartWriter
from serving.replica.events import Delta


class Pump:
    """Of one stream whose response has been started."""

    def __init__(self, exchange: CallExchange, answer: AnswerFormat, writer: PartWriter, keep_alive: KeepAlive) -> None:
        self._exchange, self._format = exchange, answer
        self._writer, self._keep_alive = writer, keep_alive
        self._last: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def run(self) -> bytes:
        """Returns what closes the stream, which is not written yet. Raises what ends it before."""
        self._writer.listen(self._go_on)
        try:
            self._exchange.listen(self._go_on)
            self._go_on()
            self._exchange.listen(self._go_on, self._take)
            return await self._last
        finally:
            self._exchange.listen(_ignore)
            self._writer.listen(None)

    def _go_on(self) -> None:
        """Write what is there, as far as the client keeps up; the rest waits, joined, where it came in."""
        try:
            while not (self._last.done() or self._writer.paused):
                if (said := self._exchange.poll()) is None:
                    return
                part = self._format.said(said)
                if self._exchange.is_complete:
                    self._last.set_result(part + self._format.end(self._exchange.usage))
                elif part:
                    self._writer.write(part)
                    self._keep_alive.silent = False
        except Exception as error:  # noqa: BLE001 - it belongs to who waits for the end, not to who brought the news
            if not self._last.done():
                self._last.set_exception(error)

    def _take(self, delta: Delta) -> bool:
        """The same for one delta that comes while nothing waits: the way of most tokens."""
        if self._writer.paused or self._last.done():
            return False
        try:
            if part := self._format.said(self._exchange.hear(delta)):
                self._writer.write(part)
                self._keep_alive.silent = False
        except Exception as error:  # noqa: BLE001 - as above
            self._last.set_exception(error)
        return True


def _ignore() -> None:
    pass
