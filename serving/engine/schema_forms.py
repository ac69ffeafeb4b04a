"""Keywords of JSON schema in other words: what restricts nothing is left out, and what can be said by keywords that are
enforced is said by those. What is left is for `json_schema` to refuse.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import orjson

from serving.request import MAX_GRAMMAR_BYTES

Schema = dict[str, Any]
Resolve = Callable[[str], Any]
"""The schema that a `$ref` names, None for one that is not there."""

MAX_ARRAYS = 400
"""That arrays of distinct items are written out to: all orders of five values."""
NULL_MEANS = frozenset({"const", "default", "example"})
OPEN = frozenset({"propertyNames", "unevaluatedProperties", "unevaluatedItems", "additionalItems"})
EMPTY = frozenset({"dependentRequired", "dependentSchemas", "dependencies"})
OFF = frozenset({"uniqueItems", "nullable", "not", "exclusiveMinimum", "exclusiveMaximum"})
NOT_SEEN = frozenset({"password", "binary", "path", "file-path", "directory-path", "html", "commonmark"})
"""Formats that say how a text is shown or used, and any text has."""
INTEGERS = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32)},
    "int64": (1024 - 2**63, 2**63 - 1024),  # llguidance takes bounds as float64, and these are the nearest within
}
ANY_NUMBER = frozenset({"float", "double", "decimal"})
LABELS = frozenset(
    {"title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
)
PLACES = frozenset({"$defs", "definitions", "$schema", "$id", "$anchor"})
LENGTHS = frozenset({"minLength", "maxLength"})


def in_enforced_words(schema: Schema, resolve: Resolve) -> Schema:
    """One level of a schema; what lies within is as it was."""
    kept = {name: value for name, value in schema.items() if not _is_idle(name, value, schema)}
    for say in (_say_format, _say_property_names):
        kept = say(kept)
    return _say_unique_items(kept, resolve) if kept.get("uniqueItems") is True else kept


def _is_idle(name: str, value: Any, schema: Schema) -> bool:
    """Whether the keyword restricts nothing."""
    if value is None:
        return name not in NULL_MEANS
    if name in OPEN and (value is True or value == {}):
        return True
    if (name in OFF and value is False) or (name in EMPTY and value == {}):
        return True
    if name == "if":
        return not schema.keys() & {"then", "else"}
    if name in ("then", "else"):
        return "if" not in schema
    if name in ("minContains", "maxContains", "contains"):
        return "contains" not in schema or (schema.get("minContains") == 0 and schema.get("maxContains") is None)
    return name.startswith("x-") and name != "x-guidance"


def _say_format(schema: Schema) -> Schema:
    """That of a number is a range, or says how it is stored."""
    form, kinds = schema.get("format"), _kinds(schema)
    without = {name: value for name, value in schema.items() if name != "format"}
    if not isinstance(form, str):
        return schema
    if form in NOT_SEEN:
        return without
    if not kinds or "string" in kinds:
        return schema
    if form in INTEGERS and "integer" in kinds and "number" not in kinds:
        low, high = INTEGERS[form]
        low, high = max(low, _number(schema, "minimum", low)), min(high, _number(schema, "maximum", high))
        return {**without, "minimum": low, "maximum": high}
    return without if form in ANY_NUMBER or not set(kinds) & {"integer", "number"} else schema


def _say_property_names(schema: Schema) -> Schema:
    names, extra = schema.get("propertyNames"), schema.get("additionalProperties", True)
    if not isinstance(names, dict) or "patternProperties" in schema:
        return schema
    rule = {name: value for name, value in names.items() if name not in LABELS and (name, value) != ("type", "string")}
    kept = {name: value for name, value in schema.items() if name != "propertyNames"}
    if not rule:
        return kept
    given, needed = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(given, dict) or not isinstance(needed, list):
        return schema
    allows = _allows(rule, has_names=bool(given or needed))
    if allows is None or not all(allows(name) for name in needed):
        return schema
    listed = {name: value for name, value in given.items() if allows(name)}
    closed = {**kept, "properties": listed, "additionalProperties": False}
    if extra is False:
        return closed
    if rule.keys() <= {"enum", "const"}:
        others = [name for name in _values(rule) if isinstance(name, str) and name not in listed]
        return {**closed, "properties": {**listed, **dict.fromkeys(others, extra)}}
    if listed and extra not in (True, {}):  # it would apply to those that are listed, too
        return schema
    return {**closed, "patternProperties": {_pattern(rule): extra}}


def _allows(rule: Schema, *, has_names: bool) -> Callable[[Any], bool] | None:
    """Which names, if the rule is one that is understood. A client's pattern is never tried on its names here, as that
    may take for ever."""
    if rule.keys() in ({"enum"}, {"const"}):
        values = _values(rule)
        return lambda name: name in values
    if rule.keys() == {"pattern"} and isinstance(rule["pattern"], str) and not has_names:
        return lambda name: True
    if rule.keys() <= LENGTHS and all(type(length) is int and length >= 0 for length in rule.values()):
        least, most = rule.get("minLength", 0), rule.get("maxLength", math.inf)
        return lambda name: isinstance(name, str) and least <= len(name) <= most
    return None


def _pattern(rule: Schema) -> str:
    if "pattern" in rule:
        return str(rule["pattern"])
    return rf"^[\s\S]{{{rule.get('minLength', 0)},{rule.get('maxLength', '')}}}$"


def _say_unique_items(schema: Schema, resolve: Resolve) -> Schema:
    """All arrays there are, if they are few."""
    kept = {name: value for name, value in schema.items() if name != "uniqueItems"}
    if _count(schema, "maxItems", 2) <= 1:
        return kept
    values = _item_values(schema.get("items"), resolve)
    labels = {name: value for name, value in schema.items() if name in LABELS | PLACES}
    kinds, words = set(_kinds(schema)), schema.keys() - labels.keys()
    if values is None or kinds not in ({"array"}, {"array", "null"}):
        return schema
    if not words <= {"type", "items", "minItems", "maxItems", "uniqueItems"}:
        return schema
    sizes = range(_count(schema, "minItems", 0), min(_count(schema, "maxItems", len(values)), len(values)) + 1)
    if not sizes or len(values) > MAX_ARRAYS:
        return schema
    num_arrays = sum(math.perm(len(values), size) for size in sizes)
    if num_arrays > MAX_ARRAYS or num_arrays * len(orjson.dumps(values)) > MAX_GRAMMAR_BYTES:
        return schema
    arrays: list[Any] = [list(order) for size in sizes for order in itertools.permutations(values, size)]
    return {**labels, "enum": [*arrays, *([None] if "null" in kinds else [])]}


def _item_values(items: Any, resolve: Resolve) -> list[Any] | None:
    """The values that an item may have, if they are listed."""
    for _ in range(8):
        if not (isinstance(items, dict) and isinstance(items.get("$ref"), str)):
            break
        items = resolve(items["$ref"])
    if not isinstance(items, dict):
        return None
    rule = {name: value for name, value in items.items() if name not in LABELS}
    if rule == {"type": "boolean"}:
        return [False, True]
    if rule.keys() - {"type"} not in ({"enum"}, {"const"}) or not isinstance(rule.get("type", "string"), str):
        return None
    values = _values(rule)
    if "type" in rule:
        values = [value for value in values if _is_a(rule["type"], value)]
    return list({orjson.dumps(value): value for value in values}.values())


def _is_a(kind: str, value: Any) -> bool:
    kinds: dict[str, type | tuple[type, ...]] = {
        "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
        "null": type(None),
    }  # fmt: skip
    return isinstance(value, kinds.get(kind, ())) and (kind == "boolean" or not isinstance(value, bool))


def _values(rule: Schema) -> list[Any]:
    values = rule.get("enum", [rule.get("const")])
    return values if isinstance(values, list) else []


def _kinds(schema: Schema) -> list[str]:
    kinds: Iterable[Any] = kind if isinstance(kind := schema.get("type", []), list) else [kind]
    return [kind for kind in kinds if isinstance(kind, str)]


def _number(schema: Schema, keyword: str, default: int) -> Any:
    value = schema.get(keyword, default)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def _count(schema: Schema, keyword: str, default: int) -> int:
    value = schema.get(keyword, default)
    return value if type(value) is int and value >= 0 else default
