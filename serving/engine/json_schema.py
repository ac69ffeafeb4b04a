"""What a JSON schema may say here. A keyword that would not be enforced is refused by name: silence would be a lie.

llguidance enforces what is listed and refuses the standard's other keywords itself, but skips words that it has never
heard of, such as a misspelt `minLenght`.
"""

from collections.abc import Iterator
from typing import Any

import orjson

from serving.errors import InvalidRequest

PARAM = "response_format"
MAX_DEPTH = 32
"""Schemas within schemas."""
MAX_PROPERTIES = 500
"""Of one object. Each token's mask costs time for every property that may still come, at 500 some milliseconds."""

SCHEMA = frozenset({"items", "additionalProperties"})
SCHEMA_LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
SCHEMA_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
VALUES = frozenset(
    {
        "type", "const", "enum", "$ref", "required", "minProperties", "maxProperties", "minItems", "maxItems",
        "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
        "multipleOf",
    }
)  # fmt: skip
ANNOTATIONS = frozenset(
    {
        "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly",
        "discriminator", "$schema", "$id", "$comment", "$anchor",
    }
)  # fmt: skip
"""They say nothing about what is valid."""
KNOWN = SCHEMA | SCHEMA_LISTS | SCHEMA_MAPS | VALUES | ANNOTATIONS


def check_schema(text: str, param: str = PARAM) -> None:
    """Raises InvalidRequest for what is no JSON object, nested too deeply, or uses a keyword that is not enforced.
    `param` is the field of the request that it names."""
    try:
        _check(text)
    except InvalidRequest as error:
        error.param = param
        raise


def _check(text: str) -> None:
    todo: list[tuple[Any, str, int]] = [(_parse(text), "", 0)]
    while todo:
        schema, path, depth = todo.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise _refuse(f"the schema at {path or 'the top'} must be an object, got {type(schema).__name__}.")
        if depth > MAX_DEPTH:
            raise _refuse(f"the schema is nested more than {MAX_DEPTH} deep; take parts of it out into $defs.")
        _check_keywords(schema, path)
        todo.extend((inner, where, depth + 1) for inner, where in _inside(schema, path))


def _parse(text: str) -> dict[str, Any]:
    try:
        schema = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _refuse(f"the schema is not valid JSON: {error}.") from error
    if not isinstance(schema, dict):
        raise _refuse(f"the schema must be a JSON object, got {type(schema).__name__}.")
    return schema


def _check_keywords(schema: dict[str, Any], path: str) -> None:
    for keyword in schema.keys() - KNOWN:
        raise _refuse(f"the schema's keyword {keyword!r} at {path or 'the top'} is not enforced here; leave it out.")
    kinds = schema.get("type", "string")
    if "format" in schema and "string" not in ([kinds] if isinstance(kinds, str) else kinds):
        raise _refuse(f"the schema's keyword 'format' at {path or 'the top'} is enforced for strings only.")
    num_properties = len(_of(dict, schema.get("properties", {}), "properties"))
    if num_properties > MAX_PROPERTIES:
        raise _refuse(
            f"the object at {path or 'the top'} may have {MAX_PROPERTIES} properties, got {num_properties:,}."
        )


def _inside(schema: dict[str, Any], path: str) -> Iterator[tuple[Any, str]]:
    """The schemas one level down, with where they stand."""
    for keyword in schema.keys() & SCHEMA:
        yield schema[keyword], f"{path}/{keyword}"
    for keyword in schema.keys() & SCHEMA_LISTS:
        yield from ((inner, f"{path}/{keyword}/{i}") for i, inner in enumerate(_of(list, schema[keyword], keyword)))
    for keyword in schema.keys() & SCHEMA_MAPS:
        yield from ((inner, f"{path}/{keyword}/{name}") for name, inner in _of(dict, schema[keyword], keyword).items())


def _of(kind: type, value: Any, keyword: str) -> Any:
    if not isinstance(value, kind):
        wanted = "a list" if kind is list else "an object"
        raise _refuse(f"the schema's keyword {keyword!r} needs {wanted}, got {type(value).__name__}.")
    return value


def _refuse(message: str) -> InvalidRequest:
    return InvalidRequest(message, param=PARAM)
