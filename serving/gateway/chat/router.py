"""POST /v1/chat and the WebSocket /v1/chat/ws."""

from fastapi import APIRouter, WebSocket
from starlette.requests import Request
from starlette.responses import Response

from serving.gateway.answer import AnswerResponse
from serving.gateway.body import read_json_object
from serving.gateway.call import Services
from serving.gateway.chat.body import ShortBody, read_short
from serving.gateway.chat.format import ShortFormat
from serving.gateway.chat.socket import ChatSocket
from serving.gateway.direct_route import DirectRoute
from serving.gateway.openapi import reads
from serving.gateway.request_id import request_id_of


def chat_router(services: Services, max_body_bytes: int) -> APIRouter:
    router = APIRouter(route_class=DirectRoute)

    @router.post("/v1/chat", openapi_extra=reads(ShortBody))
    async def chat(request: Request) -> Response:
        chat = read_short(services, await read_json_object(request, max_body_bytes))
        exchange, body = chat.exchange(request_id_of(request)), chat.body
        return AnswerResponse(exchange, ShortFormat(), stream=bool(body.stream), ignored=body.ignored)

    @router.websocket("/v1/chat/ws")
    async def chat_socket(socket: WebSocket) -> None:
        await ChatSocket(services, socket).run()

    return router
