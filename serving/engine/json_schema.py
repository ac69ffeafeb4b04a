"""What a JSON schema may say here. A keyword that would not be enforced is refused by name: silence would be a lie.

llguidance enforces what is listed and refuses the standard's other keywords itself, but skips words that it has never
heard of, such as a misspelt `minLenght`.
"""

from typing import Any

import orjson

from serving.engine.schema_forms import in_enforced_words
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


def enforced_schema(text: str, param: str = PARAM) -> str:
    """The same schema in keywords that are enforced, those that restrict nothing left out.

    Raises InvalidRequest for what is no JSON object, nested too deeply, or uses a keyword that is not enforced. `param`
    is the field of the request that it names.
    """
    try:
        return _Writer(_parse(text)).text or text
    except InvalidRequest as error:
        error.param = param
        raise


class _Writer:
    """Of one schema. `text` is None if it is as it was, to the last digit of its numbers."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._whole = schema
        said = self._say(schema, "", 0)
        self.text = None if said == schema else orjson.dumps(said).decode()

    def _say(self, schema: Any, path: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _refuse(f"the schema at {path or 'the top'} must be an object, got {type(schema).__name__}.")
        if depth > MAX_DEPTH:
            raise _refuse(f"the schema is nested more than {MAX_DEPTH} deep; take parts of it out into $defs.")
        schema = in_enforced_words(schema, self._resolve)
        _check_keywords(schema, path)
        return schema | self._inside(schema, path, depth + 1)

    def _inside(self, schema: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        """The schemas one level down, by the keyword that they belong to."""
        said: dict[str, Any] = {}
        for keyword in schema.keys() & SCHEMA:
            said[keyword] = self._say(schema[keyword], f"{path}/{keyword}", depth)
        for keyword in schema.keys() & SCHEMA_LISTS:
            items = enumerate(_of(list, schema[keyword], keyword))
            said[keyword] = [self._say(inner, f"{path}/{keyword}/{i}", depth) for i, inner in items]
        for keyword in schema.keys() & SCHEMA_MAPS:
            named = _of(dict, schema[keyword], keyword).items()
            said[keyword] = {name: self._say(inner, f"{path}/{keyword}/{name}", depth) for name, inner in named}
        return said

    def _resolve(self, ref: str) -> Any:
        """None for what is not within this schema."""
        place: Any = self._whole if ref.startswith("#") else None
        for name in ref.removeprefix("#").split("/")[1:]:
            place = place.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(place, dict) else None
        return place


def _parse(text: str) -> dict[str, Any]:
    try:
        schema = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _refuse(f"the schema is not valid JSON: {error}.") from error
    if not isinstance(schema, dict):
        raise _refuse(f"the schema must be a JSON object, got {type(schema).__name__}.")
    return schema


def _check_keywords(schema: dict[str, Any], path: str) -> None:
    for keyword in sorted(schema.keys() - KNOWN):
        raise _refuse(f"the schema's keyword {keyword!r} at {path or 'the top'} is not enforced here; leave it out.")
    kinds = schema.get("type", "string")
    if "format" in schema and "string" not in ([kinds] if isinstance(kinds, str) else kinds):
        raise _refuse(f"the schema's keyword 'format' at {path or 'the top'} is enforced for strings only.")
    num_properties = len(_of(dict, schema.get("properties", {}), "properties"))
    if num_properties > MAX_PROPERTIES:
        raise _refuse(
            f"the object at {path or 'the top'} may have {MAX_PROPERTIES} properties, got {num_properties:,}."
        )


def _of(kind: type, value: Any, keyword: str) -> Any:
    if not isinstance(value, kind):
        wanted = "a list" if kind is list else "an object"
        raise _refuse(f"the schema's keyword {keyword!r} needs {wanted}, got {type(value).__name__}.")
    return value


def _refuse(message: str) -> InvalidRequest:
    return InvalidRequest(message, param=PARAM)
