"""What an answer says, in the JSON of chat completions: whole as a message, piece by piece as deltas."""

from typing import Any

from serving.gateway.choice import Choice, ToolCall
from serving.gateway.speech.pieces import Content, Piece, Reasoning, ToolArguments, ToolStart


def chat_message(choice: Choice) -> dict[str, Any]:
    """`content` is null where there are only calls or thoughts."""
    text = choice.text or (None if choice.calls or choice.thoughts else "")
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if choice.thoughts:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["tool_calls"] = [tool_call(call) for call in choice.calls]
    return message


def tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def piece_delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case ToolStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
