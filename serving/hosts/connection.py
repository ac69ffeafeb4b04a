"""Connection: JSON messages over one TCP connection between host 0 and another host, and a heartbeat each way.

The end of a process closes its connections, so a host that is killed is missed at once. One that stands still, or that
no longer can be reached, is missed when nothing was heard of it for `LOST_S`.
"""

import contextlib
import socket
import threading
from typing import Any

import orjson

BEAT_S = 1.0
LOST_S = 8.0
MAX_BYTES = 1 << 28
"""Of a message: more than the largest prompts that can arrive between two steps."""
CLOSED = "closed its connection"
_LENGTH_BYTES = 4
_BEAT = bytes(_LENGTH_BYTES)  # a message without a body


class Connection:
    """One end. `send` may be called by several threads, `receive` by one. Both raise ConnectionError with the reason,
    as what the other host did: from then on the connection is of no use."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(LOST_S)
        self._socket = sock
        self._sending = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def send(self, message: Any) -> None:
        """Anything that is JSON, dataclasses included."""
        self.send_frame(frame(message))

    def send_frame(self, data: bytes) -> None:
        """What `frame` made, once for several connections."""
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError as error:
            raise ConnectionError(reason_of(error)) from error

    def receive(self) -> Any:
        """The next message; waits for it."""
        while True:
            length = int.from_bytes(self._read(_LENGTH_BYTES), "big")
            if length > MAX_BYTES:
                raise ConnectionError(f"sent a message of {length:,} bytes")
            if length:
                return _parse(self._read(length))

    def close(self) -> None:
        """The other host finds out, and so does a thread of this one that still receives."""
        self._closed.set()
        with contextlib.suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            try:
                self.send_frame(_BEAT)
            except ConnectionError:
                return  # whoever receives finds out, too

    def _read(self, length: int) -> bytes:
        data = bytearray(length)
        view, at = memoryview(data), 0
        while at < length:
            try:
                count = self._socket.recv_into(view[at:])
            except OSError as error:
                raise ConnectionError(reason_of(error)) from error
            if not count:
                raise ConnectionError(CLOSED)
            at += count
        return bytes(data)


def frame(message: Any) -> bytes:
    body = orjson.dumps(message)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def reason_of(error: OSError) -> str:
    """As what the other host did."""
    if isinstance(error, TimeoutError):
        return f"was not heard of for {LOST_S:g} s"
    if isinstance(error, BrokenPipeError | ConnectionResetError):
        return CLOSED
    return f"lost its connection ({error.strerror or error})"


def _parse(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ConnectionError("sent something that is no message") from error
