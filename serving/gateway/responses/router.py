"""POST /v1/responses, and GET and DELETE of those that are stored."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serving.errors import InvalidRequest
from serving.gateway.answer import AnswerResponse
from serving.gateway.body import read_json_object
from serving.gateway.call import Services
from serving.gateway.choice import Choice
from serving.gateway.errors import NoSuchPath
from serving.gateway.exchange import Exchange
from serving.gateway.openapi import reads
from serving.gateway.parse import parse_body
from serving.gateway.request_id import request_id_of
from serving.gateway.responses.body import CHAT_NAMES, ResponseBody
from serving.gateway.responses.format import ResponsesFormat
from serving.gateway.responses.items import answer_message
from serving.gateway.responses.store import ResponseStore, Stored


class NoSuchResponse(NoSuchPath):
    code = "response_not_found"


def responses_router(services: Services, max_body_bytes: int, store: ResponseStore) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses", openapi_extra=reads(ResponseBody))
    async def create(request: Request) -> Response:
        body = parse_body(ResponseBody, await read_json_object(request, max_body_bytes))
        conversation = [*_before(store, body.previous_response_id), *body.new_messages()]
        exchange = _exchange(body, conversation, services, request_id_of(request))

        def keep(response_id: str, response: bytes, choice: Choice) -> None:
            if body.store is not False:
                store.put(response_id, response, [*conversation, answer_message(choice)])

        return AnswerResponse(exchange, ResponsesFormat(body, keep), stream=bool(body.stream), ignored=body.ignored)

    @router.get("/v1/responses/{response_id}")
    async def retrieve(response_id: str) -> Response:
        return Response(_stored(store, response_id).response, media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete(response_id: str) -> dict[str, Any]:
        if not store.delete(response_id):
            raise _not_stored(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return router


def _exchange(body: ResponseBody, conversation: list[dict[str, Any]], services: Services, request_id: str) -> Exchange:
    """Raises InvalidRequest, in the words of this protocol."""
    chat = body.to_chat(conversation, services)
    try:
        return chat.exchange(request_id)
    except InvalidRequest as error:
        error.param = CHAT_NAMES.get(error.param or "", error.param)
        raise


def _before(store: ResponseStore, response_id: str | None) -> list[dict[str, Any]]:
    if response_id is None:
        return []
    stored = store.get(response_id)
    if stored is None:
        raise InvalidRequest(str(_not_stored(response_id)), param="previous_response_id")
    return stored.conversation()


def _stored(store: ResponseStore, response_id: str) -> Stored:
    stored = store.get(response_id)
    if stored is None:
        raise _not_stored(response_id)
    return stored


def _not_stored(response_id: str) -> NoSuchResponse:
    return NoSuchResponse(f"no response {response_id[:80]!r} is stored here; it may have expired.")
