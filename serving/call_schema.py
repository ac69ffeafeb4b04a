"""The JSON schema of a call of a tool: its name, and arguments that follow the tool's own schema. Imports no JAX."""

from collections.abc import Sequence
from typing import Any

from serving.schema_refs import moved

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
Function = tuple[str, dict[str, Any]]
"""A tool's name and the schema of its arguments."""


def call_schema(functions: Sequence[Function], key: str = "arguments") -> tuple[dict[str, Any], dict[str, Any]]:
    """A call of any of them, and the `$defs` that it needs at the top of the schema that it becomes part of.

    Each tool's own schema has a place of its own there, so that its references stay right. Arguments are called `key`.
    """
    places = [f"tool{i}" for i in range(len(functions))]
    calls = [_call(name, place, key) for (name, _), place in zip(functions, places, strict=True)]
    schemas = {place: moved(schema, place) for (_, schema), place in zip(functions, places, strict=True)}
    return {"anyOf": calls}, schemas


def _call(name: str, place: str, key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{place}"}},
        "required": ["name", key],
        "additionalProperties": False,
    }
