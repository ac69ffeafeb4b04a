"""Requests that other servers were reported to get wrong, where no other file here is about the matter.

After each of them a normal request is answered: one client's mistake is nobody else's problem.
"""

import json

import pytest

from tests.fakes import FAKE_NAME, sse_events
from tests.grammars import is_valid

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "abc"}]


@pytest.fixture
async def checked(http):
    yield http
    good = await http.post(COMPLETIONS, json={"model": FAKE_NAME, "prompt": "abc", "max_tokens": 3})
    assert (good.status_code, good.json()["choices"][0]["text"]) == (200, "abc")


def form(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


IMPOSSIBLE = {
    "a regex that does not close": {"type": "string", "pattern": "^(a"},
    "a regex of a mapping": {"type": "string", "pattern": {"a": 1}},
    "look-around": {"type": "string", "pattern": "(?<=a)b"},
    "a type that is none": {"type": "str"},
    "a type that is a number": {"type": 7},
    "types that are none": {"type": ["string", "text"]},
    "properties as a list": {"type": "object", "properties": ["a"]},
    "required as a word": {"type": "object", "properties": {"a": {}}, "required": "a"},
    "items as a word": {"type": "array", "items": "string"},
    "an enum of nothing": {"enum": []},
    "an enum that is a word": {"enum": "red"},
    "a negative length": {"type": "string", "maxLength": -1},
    "a length in words": {"type": "string", "maxLength": "ten"},
    "limits that exclude each other": {"type": "integer", "minimum": 5, "maximum": 3},
    "a reference to nowhere": {"$ref": "#/$defs/nowhere"},
    "a reference in a circle": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "nothing is valid": {"not": {}},
}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_schema_that_cannot_be_followed_is_a_400_at_the_door(checked, stream):
    for name, schema in IMPOSSIBLE.items():
        body = {"model": FAKE_NAME, "messages": MESSAGES, "response_format": form(schema), "stream": stream}
        response = await checked.post(CHAT, json=body)
        assert response.status_code == 400, (name, response.text)
        error = response.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "response_format"), name


async def test_the_field_that_brought_the_schema_is_named(checked):
    bad = IMPOSSIBLE["a type that is none"]
    for field, value in (("guided_json", bad), ("guided_regex", "(a"), ("guided_grammar", "start: nope")):
        response = await checked.post(CHAT, json={"model": FAKE_NAME, "messages": MESSAGES, field: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)


ENFORCED = {
    "maxItems": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2},
    "pattern and maxLength": {"type": "string", "pattern": "^[ab]+$", "maxLength": 3, "minLength": 2},
    "no type": {"enum": ["blue", {"a": [7]}]},
}


async def test_a_keyword_is_enforced(checked):
    for name, schema in ENFORCED.items():
        body = {"model": FAKE_NAME, "messages": MESSAGES, "response_format": form(schema), "max_tokens": 200}
        choice = (await checked.post(CHAT, json=body)).json()["choices"][0]
        assert choice["finish_reason"] == "stop", name
        assert is_valid(schema, json.loads(choice["message"]["content"])), (name, choice)


async def test_parts_of_allof_hold_together(checked):
    schema = {"allOf": [{"type": "integer", "minimum": 15}, {"maximum": 16}]}
    response = await checked.post(COMPLETIONS, json={"model": FAKE_NAME, "prompt": "x", "guided_json": schema})
    assert response.json()["choices"][0]["text"] in ("15", "16")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_answer_that_is_cut_says_length(checked, path):
    """Streamed too, and never `stop`."""
    body = {"model": FAKE_NAME, "max_tokens": 4} | ({"messages": MESSAGES} if path == CHAT else {"prompt": "abc"})
    assert (await checked.post(path, json=body)).json()["choices"][0]["finish_reason"] == "length"
    events = sse_events((await checked.post(path, json=body | {"stream": True})).text)[:-1]
    assert [e["choices"][0]["finish_reason"] for e in events if e["choices"][0]["finish_reason"]] == ["length"]
