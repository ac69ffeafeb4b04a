"""GatewayProtocol: uvicorn's HTTP, for clients that never finish saying what they want, that would rather speak another
protocol, or an older one.

An Upgrade to what is not spoken here is ignored (RFC 9110, 7.8). httptools takes whatever follows any Upgrade for that
other protocol, body included, so such a request is parsed once more, without the Upgrade. HTTP/1.0 knows no chunks:
where nobody can tell the length of a body, the end of the connection is its end (RFC 9112, 6.3).
"""

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from starlette.types import Message, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEADERS_TIMEOUT_S = 20.0
MAX_HEADER_BYTES = 64 << 10
MAX_CRUMBS, CRUMB_BYTES = 10_000, 64
"""A body may come in so many parts, and in more if they have so many bytes on average: each part costs the same."""


class HeadersTooLarge(Exception):
    """The parser turns it into a 400."""


class BodyInCrumbs(Exception):
    """The same."""


CONNECTION = "connection"
CONNECT = b"CONNECT"
BEFORE_CHUNKS = ("0.9", "1.0")


class Connection:
    """What a response may know of its client beyond ASGI, once it has been started: whether it reads, whether it is
    still there, and a way to write parts of the body without a coroutine. For the middle of streams of small events, of
    which there are tens of thousands in a second; start and end go through ASGI as ever."""

    __slots__ = ("_write", "gone", "is_chunked", "on_gone", "on_resume", "paused", "silent")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._write: Callable[[bytes], object] = transport.write
        self.paused = False
        """The client does not keep up: what is written now would only pile up."""
        self.gone = self.silent = False
        """`silent` is for others to set: nothing was written here since."""
        self.is_chunked = True
        """Otherwise parts leave as they are, and the connection ends with the response."""
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
        self._write(b"%x\r\n%b\r\n" % (len(part), part) if self.is_chunked else part)

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


class _Parser(httptools.HttpRequestParser):
    """Tells the protocol where a request ends that asks for an Upgrade which is ignored."""

    def __init__(self, protocol: "GatewayProtocol") -> None:
        super().__init__(protocol)
        self._protocol = protocol
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own has it

    def feed_data(self, data: bytes | memoryview) -> None:  # type: ignore[override]
        """In a loop, without copies: there may be thousands of such requests in one piece of data."""
        parser, rest = self, memoryview(data)
        while True:
            try:
                return super(_Parser, parser).feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._protocol.ignores_upgrade:
                    raise
                rest, parser = rest[upgrade.args[0] :], self._protocol.parse_without_upgrade()


class GatewayProtocol(HttpToolsProtocol):
    """One connection. From its start, and from the first byte of each request, its headers must come in time."""

    headers_timeout_s = HEADERS_TIMEOUT_S
    _connection: Connection

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_header_bytes = self._num_parts = self._num_body_bytes = 0
        self.parser = _Parser(self)
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
        if self.ignores_upgrade:
            return
        is_old = self.parser.get_http_version() in BEFORE_CHUNKS
        self.expect_100_continue &= not is_old  # RFC 9110, 10.1.1
        if self.url.startswith((b"http://", b"https://")) and self.url.count(b"/") == 2:
            self.url = self.url.replace(b"?", b"/?") if b"?" in self.url else self.url + b"/"  # RFC 9112, 3.2.2
        super().on_headers_complete()
        if self.parser.should_upgrade():
            return
        if is_old:
            self.cycle.keep_alive = self.parser.should_keep_alive()
        if is_old or self.expect_100_continue:
            self.cycle.send = _Frames(self.cycle, self._connection, is_old).send  # type: ignore[method-assign, assignment]

    def on_message_complete(self) -> None:
        if not self.ignores_upgrade:
            super().on_message_complete()

    @property
    def ignores_upgrade(self) -> bool:
        """The request that is being parsed asks for one that is not spoken here."""
        return self.parser.should_upgrade() and self.parser.get_method() != CONNECT and not self._should_upgrade()

    def parse_without_upgrade(self) -> _Parser:
        """The headers that are complete once more, by a new parser, which is to go on with what came behind them."""
        version = self.parser.get_http_version().encode()
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self.parser = parser = _Parser(self)
        parser.feed_data(b"".join([*head, b"\r\n"]))
        return parser

    def _should_upgrade(self) -> bool:
        """To a WebSocket; it may be one of several that the client offers."""
        may = self.parser.get_method() == b"GET" and self.parser.get_http_version() not in BEFORE_CHUNKS
        return may and self._should_upgrade_to_ws() and b"websocket" in _tokens(self.headers, b"upgrade")

    def handle_websocket_upgrade(self) -> None:
        """What else the client offered would confuse who takes over."""
        others = [header for header in self.headers if header[0] != b"upgrade"]
        self.scope["headers"] = [*others, (b"upgrade", b"websocket")]
        super().handle_websocket_upgrade()

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


class _Frames:
    """How the client finds the ends of a response, where that is not as uvicorn writes it."""

    def __init__(self, cycle: RequestResponseCycle, connection: Connection, is_old: bool) -> None:
        self._cycle, self._connection, self._is_old = cycle, connection, is_old
        self._send = cycle.send
        self._until_close = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message = self._start(message)
        elif self._until_close:  # any number of bytes is right
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)  # type: ignore[arg-type]

    def _start(self, message: Message) -> Message:
        cycle, headers = self._cycle, list(message.get("headers", []))
        if cycle.waiting_for_100_continue:
            cycle.keep_alive = False  # nobody knows whether a body comes now
        if self._is_old and not any(name.lower() == b"content-length" for name, _ in headers):
            self._until_close, cycle.keep_alive = True, False
            cycle.chunked_encoding = self._connection.is_chunked = False
        elif self._is_old and cycle.keep_alive:
            headers.append((b"connection", b"keep-alive"))
        return {**message, "headers": headers}


def _tokens(headers: list[tuple[bytes, bytes]], name: bytes) -> set[bytes]:
    """Of a header that is a list, in lower case."""
    return {token.strip().lower() for key, value in headers if key == name for token in value.split(b",")}
