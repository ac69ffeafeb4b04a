"""Reading a request's body: bounded, JSON, an object."""

import asyncio
import time
from typing import Any

import orjson
from starlette.requests import Request

from serving.errors import InvalidRequest
from serving.gateway.body_budget import FREE_BYTES, BodyBudget
from serving.gateway.bounded_json import read_json
from serving.gateway.errors import BodyTooLarge, BodyTooSlow

BODY_TIMEOUT_S = 60.0


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """Raises BodyTooLarge, BodyTooSlow or InvalidRequest."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await _read_bounded(request, max_bytes)
    except TimeoutError as error:
        raise BodyTooSlow(f"the body did not come within {BODY_TIMEOUT_S:g} s.") from error
    return await parse_in_turn(request.app.state.body_budget, body)


async def parse_in_turn(budget: BodyBudget, text: bytes | bytearray | str, what: str = "the body") -> dict[str, Any]:
    """Long ones one after another, a tenth of a second each at worst, and in between as long for everybody else. (In a
    thread they would hold the interpreter lock all the same.) Raises InvalidRequest."""
    if len(text) <= FREE_BYTES:
        return parse_json_object(text, what)
    async with budget.turn:
        await asyncio.sleep(max(0.0, budget.next_turn_s - time.monotonic()))
        started = time.monotonic()
        try:
            return parse_json_object(text, what)
        finally:
            ended = time.monotonic()
            budget.next_turn_s = ended + (ended - started)


def parse_json_object(text: bytes | bytearray | str, what: str = "the body") -> dict[str, Any]:
    """Raises InvalidRequest that says what is wrong with `what`."""
    try:
        value = read_json(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{what} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what} must be a JSON object, got a {type(value).__name__}.")
    return value


async def _read_bounded(request: Request, max_bytes: int) -> bytes | bytearray:
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()  # a list of parts takes many times their bytes where these are small
    async for part in request.stream():
        if len(body) + len(part) > max_bytes:
            raise _too_large(max_bytes)
        body += part
    return body


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {max_bytes:,} bytes, the most this gateway reads.")
