"""How two hosts make sure of each other before either believes a word: both prove that they know the secret, for
numbers that the other has just drawn (challenge and response by HMAC-SHA256, RFC 2104).

Hosts without a secret go the same way with an empty one, so that one with and one without find each other out.
"""

import hmac
import secrets
import socket
from hashlib import sha256

from serving.secret import Secret

NONCE_BYTES = PROOF_BYTES = 32


def authenticate(sock: socket.socket, secret: Secret | None, *, is_host_0: bool) -> None:
    """Raises ConnectionError when the other end does not know this end's secret, and OSError."""
    key = b"" if secret is None else secret.value
    mine = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(mine)
    theirs = _read(sock, NONCE_BYTES)
    sock.sendall(_proof(key, is_host_0, mine, theirs))
    if not hmac.compare_digest(_read(sock, PROOF_BYTES), _proof(key, not is_host_0, theirs, mine)):
        raise ConnectionError("does not know the secret of --secret-file that this host has")


def _proof(key: bytes, is_host_0: bool, mine: bytes, theirs: bytes) -> bytes:
    """Of one side, which the other cannot send back as its own."""
    return hmac.digest(key, (b"host 0" if is_host_0 else b"other ") + mine + theirs, sha256)


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := sock.recv(count - len(data))):
            raise ConnectionError("closed its connection")
        data += more
    return data
