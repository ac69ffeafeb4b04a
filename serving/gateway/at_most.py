"""AtMost: how many elements a list or an object of a body may have."""

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

MAX_MESSAGES = 10_000
"""Of one chat, and items of one response's input."""


@dataclass(frozen=True, slots=True)
class AtMost:
    """Annotates a list or dict: counted before any element is looked at, and the first wrong element of a list ends it.
    So refusing a million of them costs no more than refusing one."""

    most: int
    what: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        inner = handler(source)
        if inner["type"] == "list":
            inner = {**inner, "fail_fast": True}
        return core_schema.no_info_before_validator_function(self._count, inner)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        described = handler(schema)
        described["maxItems" if described.get("type") == "array" else "maxProperties"] = self.most
        return described

    def _count(self, value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > self.most:
            raise ValueError(f"at most {self.most:,} {self.what}, got {len(value):,}")
        return value
