"""How two hosts show each other that they know the same secret, before either keeps or believes what the other says.

    both               32 random bytes
    the one that came  HMAC-SHA256 of "host", host 0's bytes and its own
    host 0             checks it, and only then answers with that of "host 0" and the same bytes

The secret does not travel, and no answer fits another question: neither later, nor the other way round. Of a stranger
no more than 64 bytes are read, within `LOST_S`. Hosts without a secret, which meet at loopback, do the same with an
empty one, so that one that has another, or none, is named.
"""

import hmac
import secrets
import socket
import time

from serving.hosts.connection import CLOSED, LOST_S, reason_of

NUM_BYTES = 32
HOST, HOST_0 = b"podstream host", b"podstream host 0"


class WrongSecret(ConnectionError):
    """The other side does not know this one's secret."""


def receive_host(sock: socket.socket, secret: bytes) -> None:
    """Host 0's part. Raises ConnectionError; WrongSecret for one that must not be believed."""
    end = time.monotonic() + LOST_S
    mine = _send(sock, secrets.token_bytes(NUM_BYTES))
    theirs = _read(sock, end)
    if not hmac.compare_digest(_read(sock, end), _proof(secret, HOST, mine, theirs)):
        raise WrongSecret("has another secret")
    _send(sock, _proof(secret, HOST_0, mine, theirs))


def approach_host_0(sock: socket.socket, secret: bytes) -> None:
    """The part of the one that came. Raises ConnectionError; WrongSecret where host 0 does not take its secret, or does
    not know it itself."""
    end = time.monotonic() + LOST_S
    mine = _send(sock, secrets.token_bytes(NUM_BYTES))
    theirs = _read(sock, end)
    _send(sock, _proof(secret, HOST, theirs, mine))
    try:
        answer = _read(sock, end)
    except ConnectionError as error:
        if str(error) == CLOSED:
            raise WrongSecret("has another secret") from error
        raise
    if not hmac.compare_digest(answer, _proof(secret, HOST_0, theirs, mine)):
        raise WrongSecret("has another secret")


def _proof(secret: bytes, who: bytes, of_host_0: bytes, of_host: bytes) -> bytes:
    return hmac.digest(secret, who + b"\0" + of_host_0 + of_host, "sha256")


def _send(sock: socket.socket, data: bytes) -> bytes:
    try:
        sock.sendall(data)
    except OSError as error:
        raise ConnectionError(reason_of(error)) from error
    return data


def _read(sock: socket.socket, end: float) -> bytes:
    data = b""
    while len(data) < NUM_BYTES:
        try:
            sock.settimeout(max(end - time.monotonic(), 0.001))
            piece = sock.recv(NUM_BYTES - len(data))
        except OSError as error:
            raise ConnectionError(reason_of(error)) from error
        if not piece:
            raise ConnectionError(CLOSED)
        data += piece
    return data
