"""GatewayProtocol: uvicorn's HTTP, for clients that never finish saying what they want."""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEADERS_TIMEOUT_S = 20.0
MAX_HEADER_BYTES = 64 << 10


class HeadersTooLarge(Exception):
    """The parser turns it into a 400."""


PART_WRITER = "part_writer"


class PartWriter:
    """Writes parts of a response's body without a coroutine, once the response has been started: the middle of a stream
    of small events, of which there are tens of thousands in a second. Start and end go through ASGI as ever."""

    def __init__(self, protocol: "GatewayProtocol", cycle: RequestResponseCycle) -> None:
        self._protocol, self._cycle, self._flow = protocol, cycle, cycle.flow

    @classmethod
    def of(cls, scope: Scope) -> "PartWriter | None":
        """None where the app runs on another server."""
        writer: PartWriter | None = scope.get("state", {}).get(PART_WRITER)
        return writer

    @property
    def paused(self) -> bool:
        """The client does not keep up: what is written now would only pile up."""
        return bool(self._flow.write_paused)

    def listen(self, on_resume: Callable[[], None] | None) -> None:
        """Called when it may go on."""
        self._protocol.on_resume = on_resume

    def write(self, part: bytes) -> None:
        """Nothing happens when the client is gone: that ends the request elsewhere."""
        cycle = self._cycle
        if not (cycle.disconnected or cycle.transport.is_closing()):
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part) if cycle.chunked_encoding else part)


class GatewayProtocol(HttpToolsProtocol):
    """One connection. From its start, and from the first byte of each request, its headers must come in time."""

    headers_timeout_s = HEADERS_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_header_bytes = 0
        self._headers_timer: asyncio.TimerHandle | None = None
        self.on_resume: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._forget_writer()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._forget_writer()
        super().on_response_complete()

    def _forget_writer(self) -> None:
        """It refers to the scope that holds it: only the collector, which looks rarely, would free both."""
        if self.cycle is not None:
            self.cycle.scope["state"].pop(PART_WRITER, None)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_header_bytes = 0
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
        if self.cycle is None or self.cycle.scope is not self.scope:  # it becomes a WebSocket
            return
        self.scope["state"][PART_WRITER] = PartWriter(self, self.cycle)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.on_resume is not None:
            self.on_resume()

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
