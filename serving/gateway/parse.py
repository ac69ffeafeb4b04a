"""parse_body: from JSON fields to a body, or the sentence that names the first field at fault."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from serving.errors import InvalidRequest
from serving.gateway.bounded_json import JsonRoom

MEMBER = "member:"
"""So begin the tags of a union's members: they stand in the paths of errors, where clients have sent no such thing."""

BodyT = TypeVar("BodyT", bound=BaseModel)


def parse_body(body: type[BodyT], fields: Mapping[str, Any]) -> BodyT:
    """Raises InvalidRequest that names the first field at fault. The context is the room for the JSON in its texts."""
    try:
        return body.model_validate(fields, context=JsonRoom())
    except ValidationError as error:
        raise describe(error) from error


def describe(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = _path(first["loc"])
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"the field {path!r} is not known here.", param=param)
    if first["type"] == "missing":
        return InvalidRequest(f"the field {path!r} is missing.", param=param)
    reason = str(first["msg"]).removeprefix("Value error, ")
    return InvalidRequest(f"{path}: {reason}." if path else f"{reason}.", param=param)


def _path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") -> messages[0].content"""
    path = ""
    for part in location:
        if isinstance(part, str) and part.startswith(MEMBER):
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
