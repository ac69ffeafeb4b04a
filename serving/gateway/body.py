"""Reading a request's body: bounded, JSON, an object."""

from typing import Any

import orjson
from starlette.requests import Request

from serving.errors import InvalidRequest
from serving.gateway.errors import BodyTooLarge


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """Raises BodyTooLarge or InvalidRequest."""
    body = await _read_bounded(request, max_bytes)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, got a {type(value).__name__}.")
    return value


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
