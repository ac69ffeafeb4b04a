"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from fastapi import APIRouter

from serving.errors import ModelNotFound, ReplicaUnavailable
from serving.gateway.call import Services
from serving.replica.status import ReplicaStatus


def models_router(services: Services) -> APIRouter:
    """A model is listed once it can be asked."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_row(_served(services))]}

    @router.get("/v1/models/{model:path}")
    async def get_model(model: str) -> dict[str, Any]:
        status = _served(services)
        if model != status.model:
            raise ModelNotFound(f"the model {model!r} is not served here, {status.model!r} is.", param="model")
        return _row(status)

    return router


def _served(services: Services) -> ReplicaStatus:
    if not services.replica.ready:
        raise ReplicaUnavailable("no model is ready yet; ask again in a moment.", retry_after_s=1)
    return services.replica.status


def _row(status: ReplicaStatus) -> dict[str, Any]:
    return {
        "id": status.model,
        "object": "model",
        "created": status.created_unix_s,
        "owned_by": "podstream",
        "root": status.model,
        "parent": None,
        "max_model_len": status.max_seq_len,
    }
