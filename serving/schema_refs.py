"""References of a JSON schema that becomes part of another one."""

from typing import Any


def moved(schema: Any, place: str) -> Any:
    """The schema as it must read at `#/$defs/{place}` of another one, where `#` would mean that one."""
    if isinstance(schema, list):
        return [moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _moved_value(key, value, place) for key, value in schema.items()}


def _moved_value(key: str, value: Any, place: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return f"#/$defs/{place}{value[1:]}"
    return moved(value, place)
