"""JSON of strangers, read at a bounded cost: what it would take in memory is counted before anything of it is made."""

import re
from typing import Any

import orjson

from serving.errors import InvalidRequest

MAX_DEPTH = 128
MAX_KEYS = 10_000
"""Of one object: each may be wrong, and each wrong one makes an error."""
MAX_BYTES = 16 << 20
"""In memory, beside the characters of texts: some 58,000 lists and objects, or 520,000 numbers."""
PIECE = 1 << 18
ESCAPE_GOES_ON = re.compile(rb"\\*.?", re.DOTALL)
CONTAINERS = frozenset({dict, list})
CONTAINER_BYTES, TEXT_BYTES, VALUE_BYTES = 256, 64, 32
"""About what Python takes for a list or an object, a text or key, and what a comma stands before."""


class JsonRoom:
    """What the JSON of one request may take, that in its texts included (the arguments of calls): many small ones are
    as large as one large."""

    def __init__(self, num_bytes: int = MAX_BYTES) -> None:
        self._left = self._most = num_bytes

    def read(self, data: bytes | bytearray | str) -> Any:
        """Raises InvalidRequest for what is too large, too deep or has too many keys, orjson.JSONDecodeError for what
        is no JSON."""
        if isinstance(data, str):
            data = data.encode()
        num_bytes = _weigh(data.count(b'"'), data.count(b"[") + data.count(b"{"), data.count(b","))
        if num_bytes > self._left:  # perhaps it only talks of them: commas and brackets in texts were counted, too
            num_bytes = self._weigh_exactly(data)
        self._left -= num_bytes
        return _load(data)

    def _weigh_exactly(self, data: bytes | bytearray) -> int:
        """Without what stands in texts. Raises InvalidRequest for more than there is room for."""
        num_bytes = _weigh(data.count(b'"') - data.count(b'\\"'), 0, 0)  # at least so many quotes begin or end a text
        if num_bytes <= self._left:
            num_bytes = _weigh_outside_texts(data)
        if num_bytes > self._left:
            raise InvalidRequest(
                f"the JSON holds too many values; once read it would take more than {self._most >> 20} MiB."
            )
        return num_bytes


def read_json(data: bytes | bytearray | str) -> Any:
    """By itself. Raises as JsonRoom.read does."""
    if isinstance(data, str):
        data = data.encode()
    return _load(data) if len(data) <= MAX_BYTES // CONTAINER_BYTES else JsonRoom().read(data)


def _load(data: bytes | bytearray) -> Any:
    value = orjson.loads(data)
    if not _is_flat(data):
        check_shape(value)
    return value


def _weigh_outside_texts(data: bytes | bytearray) -> int:
    """A piece at a time: what is made of one, lists of its pieces above all, takes many times its bytes."""
    num_bytes, in_text, start = 0, False, 0
    while start < len(data):
        end = start + PIECE
        if data[end - 1 : end] == b"\\" and (run := ESCAPE_GOES_ON.match(data, end)):  # to be cut nowhere in between
            end = run.end()
        piece = bytes(data[start:end]).replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')  # each quote that is left begins or ends a text
        outside = b"".join(parts[in_text::2])
        num_bytes += _weigh(len(parts) - 1, outside.count(b"[") + outside.count(b"{"), outside.count(b","))
        in_text ^= len(parts) % 2 == 0
        start = end
    return num_bytes


def _weigh(num_quotes: int, num_containers: int, num_commas: int) -> int:
    return TEXT_BYTES // 2 * num_quotes + CONTAINER_BYTES * num_containers + VALUE_BYTES * num_commas


def check_shape(value: Any) -> None:
    """Nothing behind the door needs to be ready for JSON without bottom, or for objects without end. Raises
    InvalidRequest."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        objects = [outer for outer in level if type(outer) is dict]
        widest = max(map(len, objects), default=0)
        if widest > MAX_KEYS:
            raise InvalidRequest(f"an object may have {MAX_KEYS:,} keys, one has {widest:,}.")
        lists = [outer for outer in level if type(outer) is list and not CONTAINERS.isdisjoint(map(type, outer))]
        level = [inner for each in objects for inner in each.values() if type(inner) is dict or type(inner) is list]
        level += [inner for each in lists for inner in each if type(inner) is dict or type(inner) is list]
        if not level:
            return
    raise InvalidRequest(f"the JSON is nested more than {MAX_DEPTH} deep.")


def _is_flat(data: bytes | bytearray) -> bool:
    """Too short, or with too few brackets, to have a shape that is to be refused."""
    return len(data) < MAX_KEYS * len('"":0,') and data.count(b"[") + data.count(b"{") <= MAX_DEPTH
