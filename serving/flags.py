"""Flag: how an operator names a field of a configuration. It stands in the field's annotation, and nowhere else."""

from dataclasses import dataclass, fields
from typing import Any, get_args

SIZE = "SIZE"
"""The metavar of a number of bytes, which people write as 8GiB."""


@dataclass(frozen=True, slots=True)
class Flag:
    name: str
    """With its dashes; of a switch, the name that turns it on."""
    help: str
    metavar: str | None = None


def flags_of(section: Any) -> dict[str, Flag]:
    """Of a configuration or its class, by field, in order."""
    found = {field.name: get_args(field.type)[1:] for field in fields(section)}
    return {name: notes[0] for name, notes in found.items() if notes and isinstance(notes[0], Flag)}


def changed_fields(section: Any) -> dict[str, Any]:
    """The fields with flags that differ from their default, in order: what must be passed on."""
    flags, defaults = flags_of(section), {field.name: field.default for field in fields(section)}
    values = {name: getattr(section, name) for name in flags}
    return {name: value for name, value in values.items() if value != defaults[name]}
