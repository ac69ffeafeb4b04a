"""Message: one of a chat's, as OpenAI writes it, and as chat templates know it."""

from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, model_validator

from serving.errors import InvalidRequest
from serving.gateway import neutral
from serving.gateway.at_most import AtMost
from serving.gateway.bounded_json import JsonRoom
from serving.gateway.strict import Strict

MAX_CALLS = 1_000

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
    """A string of JSON becomes the object that templates write again in their own way. What is no such object, since
    the call was cut or written badly, stays the text that the model wrote."""
    if not isinstance(value, str):
        return {} if value is None else value
    if not (text := value.lstrip()).startswith("{"):
        return value if text else {}
    try:
        arguments = (info.context or JsonRoom()).read(value)
    except (orjson.JSONDecodeError, InvalidRequest):
        return value
    return arguments if isinstance(arguments, dict) else value


class CalledFunction(Strict):
    name: str
    arguments: Annotated[dict[str, Any] | str, BeforeValidator(_read_arguments), WithJsonSchema({"type": "string"})]
    parsed_arguments: Any = None
    """What the official client made of them, as it sends it back."""


class MessageToolCall(Strict):
    id: str
    type: Literal["function"] | None = None
    function: CalledFunction
    index: int | None = None
    """Some clients send a streamed call back as it came."""

    def to_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_read_content), WithJsonSchema(CONTENT_SCHEMA)] = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], AtMost(MAX_CALLS, "calls in one message")] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None)
    refusal: str | None = None
    """What an assistant has said in place of content."""
    parsed: Any = None
    """What the official client made of the content, as it sends it back."""
    annotations: list[Any] | None = None
    """Where others found what an assistant's content says."""

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
        if self.content is None and self.role != "assistant":  # whose answer may have been cut before any
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
            "content": self.content or self.refusal or "",
        }
        if self.tool_calls:
            fields["tool_calls"] = [call.to_template() for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                fields[name] = value
        return fields
