"""Answers that are calls of tools or follow a form: whatever is drawn, the gateway's reader finds one of them."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.dialect import ToolDialect
from serving.engine.grammar import GrammarCompiler
from serving.errors import InvalidRequest
from serving.gateway.speech.pieces import Content, ToolArguments, ToolStart
from serving.gateway.speech.speech import SpeechPlan
from serving.request import MAX_CALLS, Grammar, GrammarKind
from tests.fakes import byte_tokenizer_json
from tests.grammars import compiler, is_valid, walk

FORM = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Oslo", "Rome"]}},
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = [("look", CITY), ("wait", EMPTY)]
DIALECTS = [dialect for dialect in ToolDialect if dialect is not ToolDialect.NONE]


def form_or_calls(max_calls=MAX_CALLS):
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(FORM), max_calls=max_calls)


def read(dialect, text):
    """Content, and calls as (name, arguments)."""
    speech = SpeechPlan(dialect, frozenset(name for name, _ in FUNCTIONS)).new_speech()
    content, calls = "", []
    for piece in [*speech.push(text), *speech.finish()]:
        match piece:
            case Content(text):
                content += text
            case ToolStart(_, _, name):
                calls.append([name, ""])
            case ToolArguments(index, text):
                calls[index][1] += text
    return content, calls


@pytest.mark.parametrize("dialect", [d for d in DIALECTS if d is not ToolDialect.GEMMA])  # its calls may be any text
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), max_calls=st.integers(1, 3), in_thought=st.booleans())
def test_it_is_calls_or_the_form_and_never_both(dialect, seed, max_calls, in_thought):
    matcher = compiler().compile(form_or_calls(max_calls), in_thought=in_thought, functions=FUNCTIONS, dialect=dialect)
    if (text := walk(matcher, random.Random(seed))) is None:
        return
    content, calls = read(dialect, text.rpartition("</think>")[2] if in_thought else text)
    assert bool(content.strip()) != bool(calls) and len(calls) <= max_calls, text
    assert calls or is_valid(FORM, json.loads(content)), text
    for name, arguments in calls:
        assert json.loads(arguments) in ([{}] if name == "wait" else [{"city": "Oslo"}, {"city": "Rome"}]), text


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (ToolDialect.HERMES, '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>'),
        (ToolDialect.HERMES, '<tool_call>{"name": "wait", "arguments": {}}</tool_call>' * 2),
        (ToolDialect.LLAMA3, '{"name": "look", "parameters": {"city": "Rome"}}'),
        (ToolDialect.MISTRAL, '[TOOL_CALLS][{"name": "wait", "arguments": {}}]'),
        (ToolDialect.MISTRAL, '[TOOL_CALLS]look[ARGS]{"city": "Oslo"}'),
        (ToolDialect.MISTRAL, "[TOOL_CALLS]wait[CALL_ID]abcdefghi[ARGS]{}"),
        (ToolDialect.GEMMA, "<start_function_call>call:look{city:<escape>Rome<escape>}<end_function_call>"),
        *((dialect, '{"a": 7}') for dialect in DIALECTS),
    ],
)
@pytest.mark.parametrize("marks", ["text", "tokens"])
def test_what_models_write_is_possible(dialect, text, marks):
    """A mark is text in one vocabulary and a token in another."""
    tokenizer = json.loads(byte_tokenizer_json())
    known = ["<tool_call>", "[TOOL_CALLS]", "[ARGS]", "<start_function_call>", "<end_function_call>"]
    for number, mark in enumerate(known if marks == "tokens" else (), start=257):
        shape = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        tokenizer["added_tokens"].append({"id": number, "content": mark, **shape})
        text = text.replace(mark, f"\0{chr(number)}\0")
    grammars = GrammarCompiler(json.dumps(tokenizer), 257 + len(known), [256])
    matcher = grammars.compile(form_or_calls(), functions=FUNCTIONS, dialect=dialect)
    parts = (([ord(part)] if part > "\xff" else part.encode()) for part in text.split("\0"))
    tokens = [token for part in parts for token in part]
    assert all(matcher.accept(token) for token in tokens), matcher.error
    assert matcher.is_stopped or matcher.accept(256)


def test_a_model_whose_calls_are_not_known_is_refused():
    with pytest.raises(InvalidRequest, match="force a call by tool_choice"):
        compiler().compile(form_or_calls(), functions=FUNCTIONS)


def test_a_tool_whose_schema_cannot_be_enforced_is_refused_by_its_field():
    odd = [("f", {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}})]
    with pytest.raises(InvalidRequest, match="'uniqueItems'") as refused:
        compiler().compile(form_or_calls(), functions=odd, dialect=ToolDialect.HERMES)
    assert refused.value.param == "tools"
