"""Reading a request's body: bounded, JSON, an object."""

import asyncio
from collections.abc import Iterable
from typing import Any

import orjson
from starlette.requests import Request

from serving.errors import InvalidRequest
from serving.gateway.errors import BodyTooLarge, BodyTooSlow

BODY_TIMEOUT_S = 60.0
MAX_DEPTH = 128


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """Raises BodyTooLarge, BodyTooSlow or InvalidRequest."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await _read_bounded(request, max_bytes)
    except TimeoutError as error:
        raise BodyTooSlow(f"the body did not come within {BODY_TIMEOUT_S:g} s.") from error
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}.") from error
    check_depth(value)
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, got a {type(value).__name__}.")
    return value


def check_depth(value: Any) -> None:
    """Nothing behind the door needs to be ready for JSON without bottom. Raises InvalidRequest."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer) if isinstance(inner, dict | list)]
        if not level:
            return
    raise InvalidRequest(f"the JSON is nested more than {MAX_DEPTH} deep.")


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


async def _read_bounded(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {max_bytes:,} bytes, the most this gateway reads.")
