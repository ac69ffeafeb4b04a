"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from fastapi import APIRouter

from serving.errors import ModelNotFound, ReplicaUnavailable
from serving.gateway.call import Services
from serving.replica.status import ReplicaStatus


def models_router(services: Services) -> APIRouter:
    """A model is listed once it can be asked, and its adapters behind it."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": _rows(_served(services))}

    @router.get("/v1/models/{model:path}")
    async def get_model(model: str) -> dict[str, Any]:
        rows = {row["id"]: row for row in _rows(_served(services))}
        if model not in rows:
            served = f"{', '.join(map(repr, rows))} {'are' if len(rows) > 1 else 'is'}"
            raise ModelNotFound(f"the model {model!r} is not served here, {served}.", param="model")
        return rows[model]

    return router


def _served(services: Services) -> ReplicaStatus:
    if not services.replica.ready:
        raise ReplicaUnavailable("no model is ready yet; ask again in a moment.", retry_after_s=1)
    return services.replica.status


def _rows(status: ReplicaStatus) -> list[dict[str, Any]]:
    adapters = [_row(status, adapter.name, adapter.path, status.model) for adapter in status.adapters]
    return [_row(status, status.model, status.model, None), *adapters]


def _row(status: ReplicaStatus, name: str, root: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": status.created_unix_s,
        "owned_by": "podstream",
        "root": root,
        "parent": parent,
        "max_model_len": status.max_seq_len,
        "source": status.source if parent is None else root,
    }
