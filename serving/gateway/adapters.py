"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's shape."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from serving.gateway.body import read_json_object
from serving.gateway.call import Services
from serving.gateway.openapi import reads
from serving.gateway.parse import parse_body

Text = Annotated[str, Field(min_length=1, max_length=4096)]


class LoadBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: Text
    """By which clients ask for it, as a model."""
    lora_path: Text
    """A folder on the replica's machine, or a URL."""


class UnloadBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: Text


def adapters_router(services: Services, max_body_bytes: int) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/load_lora_adapter", openapi_extra=reads(LoadBody))
    async def load(request: Request) -> Response:
        body = parse_body(LoadBody, await read_json_object(request, max_body_bytes))
        await services.replica.load_adapter(body.lora_name, body.lora_path)
        return PlainTextResponse(f"{body.lora_name} can be asked for.")

    @router.post("/v1/unload_lora_adapter", openapi_extra=reads(UnloadBody))
    async def unload(request: Request) -> Response:
        body = parse_body(UnloadBody, await read_json_object(request, max_body_bytes))
        await services.replica.unload_adapter(body.lora_name)
        return PlainTextResponse(f"{body.lora_name} is unloaded.")

    return router
