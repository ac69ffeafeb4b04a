"""Tools for chat templates that know none: described in a system message, called and answered in Hermes' way."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

INTRODUCTION = """You may call one or more of these functions to help the user. Each line is the JSON of one:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments as JSON between these tags, once per call:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def describe_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The same conversation with calls as text, and if there are tools, with them and their results as text too."""
    with_calls = [_with_calls(message) for message in messages]
    if not tools:
        return with_calls
    plain = [_with_result(message) for message in with_calls]
    told = INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0].get("role") == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{told}"}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _with_result(message: Message) -> Message:
    if message.get("role") != "tool":
        return message
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}


def _with_calls(message: Message) -> Message:
    if calls := message.get("tool_calls"):
        text = "\n".join([message["content"] or "", *map(_call, calls)]).strip()
        return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": text}
    return message


def _call(call: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
