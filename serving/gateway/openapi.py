"""/openapi.json: endpoints read their bodies themselves, so the schemas of these are added here."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

PLACE = "#/components/schemas/{model}"


def reads(body: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of an endpoint with such a body."""
    schema = {"$ref": PLACE.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_openapi(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """The document is made when it is first asked for."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=PLACE)
            document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]
