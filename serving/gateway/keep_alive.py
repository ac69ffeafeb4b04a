"""KeepAlive: a comment on a stream that has been silent for long, so that proxies do not take it for dead.

Readers of server-sent events skip comments. A stream is silent while its request waits for a slot, or prefills.
"""

import asyncio

from starlette.types import Message, Send

from serving.gateway.protocol import Connection

INTERVAL_S = 15.0
COMMENT = b": waiting\n\n"


class KeepAlive:
    """Wraps one stream's `send`, between `start` and `stop`. What is written to `connection` counts, too."""

    def __init__(self, send: Send, connection: Connection | None = None, interval_s: float = INTERVAL_S) -> None:
        self._send, self._connection = send, connection
        self._interval_s = interval_s
        self._silent = False
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._silent = True
        if self._connection is not None:
            self._connection.silent = True
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._check)

    def stop(self) -> None:
        for pending in (self._timer, self._comment):
            if pending is not None:
                pending.cancel()

    async def send(self, message: Message) -> None:
        self._silent = False
        await self._send(message)

    def _check(self) -> None:
        """A comment that a slow reader has not taken yet is enough."""
        silent = self._silent and (self._connection is None or self._connection.silent)
        if silent and (self._comment is None or self._comment.done()):
            comment = {"type": "http.response.body", "body": COMMENT, "more_body": True}
            self._comment = asyncio.ensure_future(self._tell(comment))
        self.start()

    async def _tell(self, comment: Message) -> None:
        await self._send(comment)
