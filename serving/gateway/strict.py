"""Strict: the base of what clients send. A wrong type or an unknown field is refused by name, never dropped in silence.

Fields that are not known here and say nothing (null, false, `{}` or `[]`) are what clients write who fill in all that
they know of: they change nothing, and pass.
"""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_says_nothing(cls, fields: Any) -> Any:
        if not isinstance(fields, dict) or fields.keys() <= cls.__pydantic_fields__.keys():
            return fields
        known = cls._names()
        return {name: value for name, value in fields.items() if name in known or not says_nothing(value)}

    @classmethod
    def _names(cls) -> set[str]:
        return {field.alias or name for name, field in cls.__pydantic_fields__.items()}


class Body(Strict):
    """A whole body: here the same goes for its own fields, wherever they may be left out."""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        empty = [name for name, value in fields.items() if not value and says_nothing(value)]
        if not empty:
            return fields
        dropped = {
            name for name in empty if name in cls.__pydantic_fields__ and not cls._means_something(name, fields[name])
        }
        return {name: value for name, value in fields.items() if name not in dropped}

    @classmethod
    def _means_something(cls, name: str, value: Any) -> bool:
        field = cls.__pydantic_fields__[name]
        if field.is_required() or name.startswith("guided_"):  # whose `{}` is a schema
            return True
        kinds = [field.annotation, *get_args(field.annotation)]
        return value is False and any(kind is bool or False in get_args(kind) for kind in kinds)


def says_nothing(value: Any) -> bool:
    return value is None or value is False or value == {} or value == []
