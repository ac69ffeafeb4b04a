"""Items: a response's input and output as OpenAI lists them, to and from the messages of a chat."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from serving.gateway.at_most import MAX_MESSAGES, AtMost
from serving.gateway.choice import Choice, ToolCall
from serving.gateway.parse import MEMBER
from serving.gateway.strict import Strict

TEXT, LIST = f"{MEMBER}text", f"{MEMBER}list"
TEXT_OR_LIST = Discriminator(lambda value: LIST if isinstance(value, list) else TEXT)


class TextPart(Strict):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None
    """What the official client made of the text, as it sends it back."""


Texts = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[TextPart], AtMost(MAX_MESSAGES, "parts"), Tag(LIST)], TEXT_OR_LIST
]


class InputMessage(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Texts
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    def to_message(self) -> dict[str, Any]:
        return {"role": self.role, "content": _text(self.content)}


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class CallItem(Strict):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    parsed_arguments: Any = None
    id: str | None = None
    status: str | None = None

    def to_message(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}


class OutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: Texts
    id: str | None = None
    status: str | None = None

    def to_message(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": _text(self.output)}


class ReasoningItem(Strict):
    """Sent back by clients; thoughts of earlier turns are not told to the model again."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None
    status: str | None = None

    def to_message(self) -> None:
        return None


def _member_of(item: Any) -> str:
    """What has no type is a message, as at OpenAI's."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return f"{MEMBER}{kind}" if isinstance(kind, str) else MEMBER


InputItem = Annotated[
    Annotated[InputMessage, Tag(f"{MEMBER}message")]
    | Annotated[CallItem, Tag(f"{MEMBER}function_call")]
    | Annotated[OutputItem, Tag(f"{MEMBER}function_call_output")]
    | Annotated[ReasoningItem, Tag(f"{MEMBER}reasoning")],
    Discriminator(
        _member_of,
        custom_error_type="item_type",
        custom_error_message="an item's type must be message, function_call, function_call_output or reasoning",
    ),
]
"""One member is tried, the one of its type: each that is tried in vain makes errors for all of its fields."""


def to_messages(items: str | list[InputItem]) -> list[dict[str, Any]]:
    """Calls that follow each other, and the text before them, are one message of the assistant."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for message in (item.to_message() for item in items):
        if message is None:
            continue
        if "tool_calls" in message and messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    return messages


def answer_message(choice: Choice) -> dict[str, Any]:
    """The answer as the next turn's chat has it."""
    calls = [_chat_call(call) for call in choice.calls]
    content = choice.text or (None if calls else "")
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def _chat_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def reasoning_item(item_id: str, text: str, status: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}


def message_item(item_id: str, text: str | None, status: str) -> dict[str, Any]:
    """`text` is None before it has begun."""
    content = [] if text is None else [text_part(text)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(item_id: str, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }
