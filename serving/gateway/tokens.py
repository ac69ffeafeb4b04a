"""POST /tokenize and /detokenize, in vLLM's shape: what a prompt is to the model, without asking it anything."""

from functools import partial
from typing import Annotated, Any, Self

import orjson
from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from serving.errors import ReplicaUnavailable
from serving.gateway.at_most import MAX_MESSAGES, AtMost
from serving.gateway.body import read_json_object
from serving.gateway.call import Services
from serving.gateway.disconnect import WhileConnected
from serving.gateway.labels import ModelName
from serving.gateway.message import Message
from serving.gateway.openapi import reads
from serving.gateway.parse import parse_body
from serving.gateway.strict import Strict
from serving.gateway.tools import MAX_TOOLS, Tool
from serving.request import ChatPrompt, TextPrompt

MAX_TOKENS = 1 << 20
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class TokenizeBody(Strict):
    model: ModelName | None = None
    """None: the one that is served."""
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1), AtMost(MAX_MESSAGES, "messages")] | None = None
    tools: Annotated[list[Tool], AtMost(MAX_TOOLS, "tools")] | None = None
    add_special_tokens: bool | None = None
    """Only for a plain prompt, true by default: a chat template writes its own."""
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self

    def to_prompt(self) -> TextPrompt | ChatPrompt:
        if self.messages is None:
            return TextPrompt(self.prompt or "")
        tools = tuple(tool.function.to_template() for tool in self.tools or ())
        return ChatPrompt(tuple(message.to_template() for message in self.messages), tools)


class DetokenizeBody(Strict):
    model: ModelName | None = None
    tokens: Annotated[list[TokenId], AtMost(MAX_TOKENS, "tokens")]


def tokens_router(services: Services, max_body_bytes: int) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize", openapi_extra=reads(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        body = parse_body(TokenizeBody, await read_json_object(request, max_body_bytes))
        return WhileConnected(partial(_tokenize, services, body))

    @router.post("/detokenize", openapi_extra=reads(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        body = parse_body(DetokenizeBody, await read_json_object(request, max_body_bytes))
        return WhileConnected(partial(_detokenize, services, body))

    return router


async def _tokenize(services: Services, body: TokenizeBody) -> Response:
    token_ids, texts = await services.replica.tokenize(
        body.model or _served(services),
        body.to_prompt(),
        with_bos=body.add_special_tokens is not False,
        add_generation_prompt=body.add_generation_prompt is not False,
    )
    return _json(
        {
            "count": len(token_ids),
            "max_model_len": services.replica.status.max_seq_len,
            "tokens": token_ids,
            "token_strs": texts if body.return_token_strs else None,
        }
    )


async def _detokenize(services: Services, body: DetokenizeBody) -> Response:
    return _json({"prompt": await services.replica.detokenize(body.model or _served(services), body.tokens)})


def _json(answer: dict[str, Any]) -> Response:
    return Response(orjson.dumps(answer), media_type="application/json")


def _served(services: Services) -> str:
    if not services.replica.ready:
        raise ReplicaUnavailable("no model is ready yet; ask again in a moment.", retry_after_s=1)
    return services.replica.status.model
