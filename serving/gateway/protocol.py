"""GatewayProtocol: uvicorn's HTTP, for clients that never finish saying what they want."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS_TIMEOUT_S = 20.0
MAX_HEADER_BYTES = 64 << 10


class HeadersTooLarge(Exception):
    """The parser turns it into a 400."""


class GatewayProtocol(HttpToolsProtocol):
    """One connection. From its start, and from the first byte of each request, its headers must come in time."""

    headers_timeout_s = HEADERS_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_header_bytes = 0
        self._headers_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

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
