"""Message: one of a chat's, as OpenAI writes it, and as chat templates know it."""

from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema, model_validator

from serving.gateway import neutral
from serving.gateway.at_most import AtMost
from serving.gateway.bounded_json import JsonRoom

MAX_CALLS = 1_000


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}, {"type": "null"}]}


def _read_content(value: Any) -> Any:
    """Parts become one text; a single part equals the plain string."""
    if not isinstance(value, list):
        return value
    return "\n".join(_read_part(part) for part in value)


def _read_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind != "text":
        raise ValueError(f"parts of type {kind!r} are not supported yet, only 'text'")
    if not isinstance(part.get("text"), str):
        raise ValueError("a part of type 'text' needs a string 'text'")
    return str(part["text"])


def _read_arguments(value: Any, info: ValidationInfo) -> Any:
    """A string of JSON becomes the object that templates write again in their own way."""
    if not isinstance(value, str):
        return value
    try:
        return (info.context or JsonRoom()).read(value or "{}")
    except orjson.JSONDecodeError as error:
        raise ValueError(f"are not valid JSON: {error}") from error


class CalledFunction(_Strict):
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_read_arguments), WithJsonSchema({"type": "string"})]


class MessageToolCall(_Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Some clients send a streamed call back as it came."""

    def to_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_read_content), WithJsonSchema(CONTENT_SCHEMA)] = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], AtMost(MAX_CALLS, "calls in one message")] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        kept = neutral.drop_neutral(fields, neutral.MESSAGE)
        if "reasoning" in kept:  # another server's name for it
            kept.setdefault("reasoning_content", kept.pop("reasoning"))
        return kept

    @model_validator(mode="after")
    def _fields_belong_to_the_role(self) -> Self:
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.reasoning_content)):
            raise ValueError("content is missing")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant's message has tool_calls")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("the role 'tool' and tool_call_id need each other")
        return self

    def to_template(self) -> dict[str, Any]:
        """Templates call a developer the system."""
        fields: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        if self.tool_calls:
            fields["tool_calls"] = [call.to_template() for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                fields[name] = value
        return fields
