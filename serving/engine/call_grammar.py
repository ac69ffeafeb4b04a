"""Calls of tools as grammar rules, one set per dialect: for answers that are either calls or follow a form.

Without a form a model may write its calls as it likes; where a grammar rules the answer, it rules the calls too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from serving.call_schema import Function, call_schema
from serving.dialect import ToolDialect
from serving.engine.json_schema import enforced_schema
from serving.errors import InvalidRequest

PARAM = "tools"
BLANK = r"/[ \n]{1,8}/"
CALL_ID = "/[a-zA-Z0-9]{9}/"
CALL = "one_call"

Rules = tuple[list[str], dict[str, str]]
"""Lark rules, `calls` among them, and the JSON schemas that they refer to by `@name`."""


def call_rules(
    dialect: ToolDialect, functions: Sequence[Function], max_calls: int, added_tokens: Mapping[str, int]
) -> Rules:
    """`added_tokens` are the vocabulary's by their text: a mark may be one of them, or plain text.

    Raises InvalidRequest for a dialect that is not known, or a schema that cannot be enforced.
    """

    def mark(text: str) -> str:
        written = orjson.dumps(text).decode()
        return f"({written} | <[{added_tokens[text]}]>)" if text in added_tokens else written

    match dialect:
        case ToolDialect.HERMES:
            one = f"{mark('<tool_call>')} blank? @{CALL} blank? {mark('</tool_call>')} blank?"
            return [f"calls: hermes{{1,{max_calls}}}", f"hermes: {one}", _blank()], _one_call(functions)
        case ToolDialect.LLAMA3:
            first = f"calls: ({mark('<|python_tag|>')})? @{CALL} {_others(max_calls)}"
            return [first, f'another: ";" blank? @{CALL}', _blank()], _one_call(functions, "parameters")
        case ToolDialect.MISTRAL:
            return _mistral(functions, max_calls, mark("[TOOL_CALLS]"), mark("[CALL_ID]"), mark("[ARGS]"))
        case ToolDialect.GEMMA:
            pairs = (("<start_function_call>", "<end_function_call>"), ("<|tool_call>", "<tool_call|>"))
            rules = [rule for i, pair in enumerate(pairs) for rule in _gemma(i, *pair, mark(pair[0]), added_tokens)]
            names = " | ".join(orjson.dumps(name).decode() for name, _ in functions)
            return [f"calls: (gemma0 | gemma1){{1,{max_calls}}}", *rules, f"called: {names}", _blank()], {}
        case ToolDialect.NONE:
            raise InvalidRequest(
                "how this model calls tools is not known, so its answer cannot be either a call or a form; "
                "leave one out, or force a call by tool_choice.",
                param=PARAM,
            )


def _mistral(functions: Sequence[Function], max_calls: int, calls: str, call_id: str, args: str) -> Rules:
    """A list of calls behind one mark, or name and arguments behind a mark each."""
    schemas = {f"args{i}": _enforced(schema) for i, (_, schema) in enumerate(functions)}
    named = " | ".join(
        f"{orjson.dumps(name).decode()} (({call_id} {CALL_ID})? {args})? @args{i}"
        for i, (name, _) in enumerate(functions)
    )
    return [
        f"calls: listed | named{{1,{max_calls}}}",
        f'listed: {calls} blank? "[" blank? @{CALL} {_others(max_calls)} blank? "]"',
        f'another: "," blank? @{CALL}',
        f"named: {calls} ({named}) blank?",
        _blank(),
    ], {**_one_call(functions), **schemas}


def _gemma(number: int, start: str, end: str, start_mark: str, added_tokens: Mapping[str, int]) -> list[str]:
    """Arguments are no JSON: any text up to the mark at their end."""
    ended = f" | /(?s:.*)/ <[{added_tokens[end]}]>" if end in added_tokens else ""
    body = f'body{number}[suffix="{end}"]: /(?s:.*)/'
    return [f'gemma{number}: {start_mark} "call:" called "{{" (body{number}{ended}) blank?', body]


def _others(max_calls: int) -> str:
    """`another` rule, as often as may be."""
    return f"another{{0,{max_calls - 1}}}" if max_calls > 1 else ""


def _blank() -> str:
    return f"blank: {BLANK}"


def _one_call(functions: Sequence[Function], key: str = "arguments") -> dict[str, str]:
    call, schemas = call_schema(functions, key)
    return {CALL: _enforced({**call, "$defs": schemas})}


def _enforced(schema: dict[str, Any]) -> str:
    return enforced_schema(orjson.dumps(schema).decode(), PARAM)
