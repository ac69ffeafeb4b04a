"""POST /v1/chat/completions and /v1/completions."""

import time
import uuid

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serving.gateway.answer import AnswerResponse
from serving.gateway.body import read_json_object
from serving.gateway.call import Call, Services
from serving.gateway.chats import Chat
from serving.gateway.continuous_usage import ContinuousUsage
from serving.gateway.direct_route import DirectRoute
from serving.gateway.exchange import CallExchange, Exchange
from serving.gateway.formats import AnswerFormat, AnswerHead, ChatFormat, CompletionFormat
from serving.gateway.openapi import reads
from serving.gateway.request_id import request_id_of
from serving.gateway.schema import ChatBody, CompletionBody, parse_completion


def answers_router(services: Services, max_body_bytes: int) -> APIRouter:
    """The two endpoints that make tokens."""
    router = APIRouter(route_class=DirectRoute)

    @router.post("/v1/chat/completions", openapi_extra=reads(ChatBody))
    async def chat_completions(request: Request) -> Response:
        chat = Chat.read(services, await read_json_object(request, max_body_bytes))
        answer = ChatFormat(_head("chatcmpl", chat.body))
        return _respond(chat.exchange(request_id_of(request)), answer, chat.body)

    @router.post("/v1/completions", openapi_extra=reads(CompletionBody))
    async def completions(request: Request) -> Response:
        body = parse_completion(await read_json_object(request, max_body_bytes))
        answer = CompletionFormat(_head("cmpl", body))
        exchange = CallExchange(Call(services, body.to_request(request_id_of(request))))
        return _respond(exchange, answer, body)

    return router


def _respond(exchange: Exchange, answer: AnswerFormat, body: ChatBody | CompletionBody) -> AnswerResponse:
    if body.continuous_usage:
        answer = ContinuousUsage(answer, lambda: exchange.prompt_tokens)
    ignored = body.ignored if isinstance(body, ChatBody) else ()
    return AnswerResponse(exchange, answer, stream=bool(body.stream), ignored=ignored)


def _head(prefix: str, body: ChatBody | CompletionBody) -> AnswerHead:
    created = int(time.time())
    answer_id = f"{prefix}-{uuid.uuid4().hex}"
    return AnswerHead(
        answer_id,
        created,
        body.model,
        body.include_usage,
        body.wants_logprobs,
        body.n or 1,
        body.logprobs if isinstance(body, CompletionBody) and body.echo else None,
        body.prompt_logprobs is not None,
    )
