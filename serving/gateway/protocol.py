"""GatewayProtocol: uvicorn's HTTP, for clients that never finish saying what they want."""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS_TIMEOUT_S = 20.0
MAX_HEADER_BYTES = 64 << 10
MAX_CRUMBS, CRUMB_BYTES = 10_000, 64
"""A body may come in so many parts, and in more if they have so many bytes on average: each part costs the same."""


class HeadersTooLarge(Exception):
    """The parser turns it into a 400."""


class BodyInCrumbs(Exception):
    """The same."""


CONNECTION = "connection"


class Connection:
    """What a response may know of its client beyond ASGI, once it has been started: whether it reads, whether it is
    still there, and a way to write parts of the body without a coroutine. For the middle of streams of small events, of
    which there are tens of thousands in a second; start and end go through ASGI as ever."""

    __slots__ = ("_write", "gone", "on_gone", "on_resume", "paused", "silent")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._write: Callable[[bytes], object] = transport.write
        self.paused = False
        """The client does not keep up: what is written now would only pile up."""
        self.gone = self.silent = False
        """`silent` is for others to set: nothing was written here since."""
        self.on_resume: Callable[[], object] | None = None
        self.on_gone: Callable[[], object] | None = None
        """Called when the client may be written to again, and when it has gone."""

    @classmethod
    def of(cls, scope: Scope) -> "Connection | None":
        """None where the app runs on another server."""
        connection: Connection | None = scope.get("state", {}).get(CONNECTION)
        return connection

    def write(self, part: bytes) -> None:
        """Nothing happens when the client is gone: that ends the request elsewhere."""
        self.silent = False
        self._write(b"%x\r\n%b\r\n" % (len(part), part))

    def resume(self) -> None:
        self.paused = False
        if self.on_resume is not None:
            self.on_resume()

    def end(self) -> None:
        self.gone = True
        self._write = _drop  # without the transport, which holds the protocol, which holds this
        if self.on_gone is not None:
            self.on_gone()


def _drop(part: bytes) -> None:
    pass


class GatewayProtocol(HttpToolsProtocol):
    """One connection. From its start, and from the first byte of each request, its headers must come in time."""

    headers_timeout_s = HEADERS_TIMEOUT_S
    _connection: Connection

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_header_bytes = self._num_parts = self._num_body_bytes = 0
        self._headers_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connection = Connection(transport)
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        self._connection.end()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._connection.paused = True

    def resume_writing(self) -> None:
        super().resume_writing()
        self._connection.resume()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][CONNECTION] = self._connection
        self._num_header_bytes = self._num_parts = self._num_body_bytes = 0
        self._wait_for_headers()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_parts += 1
        self._num_body_bytes += len(body)
        if self._num_parts > MAX_CRUMBS and self._num_body_bytes < CRUMB_BYTES * self._num_parts:
            raise BodyInCrumbs
        super().on_body(body)

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise HeadersTooLarge

    def _wait_for_headers(self) -> None:
        self._stop_waiting()
        self._headers_timer = self.loop.call_later(self.headers_timeout_s, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None
