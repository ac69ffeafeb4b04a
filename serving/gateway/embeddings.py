"""POST /v1/embeddings: texts or token ids to vectors of length 1, as OpenAI has it.

Inputs of one request are computed a few at a time, in places that it takes once: it is refused at once or served.
"""

import asyncio
import base64
import math
import sys
import time
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter
from pydantic import BeforeValidator, Field, WithJsonSchema
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from serving.errors import InvalidRequest, ServiceError
from serving.gateway.body import read_json_object
from serving.gateway.call import Services
from serving.gateway.disconnect import WhileConnected
from serving.gateway.labels import Labels, ModelName
from serving.gateway.openapi import reads
from serving.gateway.parse import parse_body
from serving.gateway.request_id import request_id_of
from serving.gateway.schema import read_token_ids
from serving.replica.events import Delta, Finished
from serving.request import FinishReason, Priority, Request, SamplingParams, TextPrompt, TokenPrompt

MAX_INPUTS = 2048  # OpenAI's limit
AT_ONCE = 8
"""Inputs of one request that are computed at a time."""

TOKEN_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
ONE_INPUT: list[dict[str, Any]] = [{"type": "string", "minLength": 1}, TOKEN_IDS]
INPUT_SCHEMA = {"anyOf": [*ONE_INPUT, {"type": "array", "items": {"anyOf": ONE_INPUT}, "minItems": 1}]}


def _read_input(value: Any) -> tuple[TextPrompt | TokenPrompt, ...]:
    """A text, a list of token ids, or a list of those."""
    if isinstance(value, str) or (isinstance(value, list) and set(map(type, value)) == {int}):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text, a list of token ids, or a list of one or more of these")
    if len(value) > MAX_INPUTS:
        raise ValueError(f"at most {MAX_INPUTS:,} inputs, got {len(value):,}")
    return tuple(_read_one(item) for item in value)


def _read_one(item: Any) -> TextPrompt | TokenPrompt:
    if isinstance(item, str):
        return TextPrompt(item)
    if isinstance(item, list) and set(map(type, item)) <= {int}:
        return read_token_ids(item)
    raise ValueError("holds something that is neither a text nor a list of token ids")


class EmbeddingsBody(Labels, arbitrary_types_allowed=True):
    model: ModelName
    input: Annotated[tuple[TextPrompt | TokenPrompt, ...], BeforeValidator(_read_input), WithJsonSchema(INPUT_SCHEMA)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """The first so many numbers, brought to length 1 again."""
    priority: Literal["interactive", "batch"] | None = None

    def to_requests(self, request_id: str) -> list[Request]:
        sampling, priority = SamplingParams(temperature=0.0, max_tokens=1), Priority(self.priority or "interactive")
        return [
            Request(request_id, self.model, prompt, sampling, priority=priority, prompt_only=True, embed=True)
            for prompt in self.input
        ]


def embeddings_router(services: Services, max_body_bytes: int) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings", openapi_extra=reads(EmbeddingsBody))
    async def embeddings(request: HttpRequest) -> Response:
        body = parse_body(EmbeddingsBody, await read_json_object(request, max_body_bytes))
        return WhileConnected(partial(_answer, services, body, request_id_of(request)))

    return router


async def _answer(services: Services, body: EmbeddingsBody, request_id: str) -> Response:
    found = await embed(services, body.to_requests(request_id))
    data = [_row(i, cut(vector, body.dimensions), body.encoding_format) for i, (vector, _) in enumerate(found)]
    tokens = sum(end.usage.prompt_tokens for _, end in found)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    answer = {"object": "list", "data": data, "model": body.model, "usage": usage}
    return Response(orjson.dumps(answer), media_type="application/json")


async def embed(services: Services, requests: Sequence[Request]) -> list[tuple[bytes, Finished]]:
    """The embedding of each, in order. Raises ServiceError: that of the first that fails ends them all."""
    width = min(AT_ONCE, len(requests))
    place = await services.admission.enter(requests[0], width, slots=services.replica.status.load.total_slots)
    found: list[tuple[bytes, Finished] | None] = [None] * len(requests)
    todo = iter(range(len(requests)))

    async def work() -> None:
        for index in todo:
            found[index] = await _embed_one(services, requests[index])

    workers = [asyncio.ensure_future(work()) for _ in range(width)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        services.admission.leave(place, served=False)  # how long these take says nothing about answers
    return [one for one in found if one is not None]


async def _embed_one(services: Services, request: Request) -> tuple[bytes, Finished]:
    started, reason, usage, vector = time.perf_counter(), FinishReason.ABORT, None, b""
    generation = services.replica.generate(request)
    metrics = services.metrics.of_model(services.replica.status.model)
    try:
        while True:
            event = await anext(generation)
            if isinstance(event, Delta):
                vector = vector or event.embedding
            elif isinstance(event, Finished):
                reason, usage = event.reason, event.usage
                return vector, event
    except ServiceError as error:
        reason = FinishReason.ERROR
        error.param = "input" if error.param == "prompt" else error.param
        raise
    finally:
        generation.close()
        metrics.finish(reason, time.perf_counter() - started, usage)


def cut(vector: bytes, dimensions: int | None) -> bytes:
    """Raises InvalidRequest for more dimensions than there are."""
    size = len(vector) // 4
    if dimensions is None or dimensions == size:
        return vector
    if dimensions > size:
        raise InvalidRequest(
            f"dimensions may be {size:,} at most for this model, got {dimensions:,}.", param="dimensions"
        )
    kept = _floats(vector[: 4 * dimensions])
    length = math.sqrt(math.fsum(number * number for number in kept)) or 1.0
    return _bytes(number / length for number in kept)


def _row(index: int, vector: bytes, encoding: str | None) -> dict[str, Any]:
    shown = base64.b64encode(vector).decode() if encoding == "base64" else _floats(vector).tolist()
    return {"object": "embedding", "index": index, "embedding": shown}


def _floats(vector: bytes) -> "array[float]":
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _bytes(numbers: Any) -> bytes:
    made = array("f", numbers)
    if sys.byteorder == "big":
        made.byteswap()
    return made.tobytes()
