"""Reads TOML tables into dataclasses. A key that is unknown, missing or of another type is an error that names it."""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from serving.errors import ConfigError

T = TypeVar("T")


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError when there is no such file, or it is no TOML."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from error


def read_table(kind: type[T], table: object, where: str, **given: Any) -> T:
    """`kind`, a dataclass, from a table whose keys are its fields. `given` are fields that do not stand there.

    `where` names the table in errors.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table of keys and values, got {table!r}.")
    hints = get_type_hints(kind)
    own = [field for field in fields(kind) if field.name not in given]  # type: ignore[arg-type]
    for key in table:
        if key not in {field.name for field in own}:
            raise ConfigError(f"{where}: key {key!r} is not known; {nearest(key, [field.name for field in own])}")
    values = {}
    for field in own:
        if field.name in table:
            values[field.name] = _checked(table[field.name], hints[field.name], f"{where}: {field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{where}: key {field.name!r} is missing.")
    return kind(**values, **given)


def nearest(name: str, known: list[str]) -> str:
    """What may have been meant, for the end of a sentence."""
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}."


def _checked(value: Any, hint: Any, where: str) -> Any:
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    for kind in kinds:
        if _is(value, kind):
            return tuple(value) if get_origin(kind) is tuple else value
    expected = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds if kind is not type(None))
    raise ConfigError(f"{where} must be {expected}, got {value!r}.")


def _is(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    if origin is tuple:
        return isinstance(value, list) and all(_is(item, get_args(kind)[0]) for item in value)
    if origin is dict or origin is Mapping:
        return isinstance(value, dict) and all(_is(item, get_args(kind)[1]) for item in value.values())
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)
