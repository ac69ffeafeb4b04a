"""Fields that ask for a form of the answer: understood, refused by name, and followed to the end."""

import json

import pytest

from serving.errors import InvalidRequest
from serving.gateway.schema import parse_chat, parse_completion
from serving.request import Grammar, GrammarKind
from tests.fakes import FAKE_NAME

SCHEMA = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
MESSAGES = [{"role": "user", "content": "abc"}]


def chat(**fields):
    return parse_chat({"model": "m", "messages": MESSAGES, **fields}).to_request("r").grammar


def schema_of(grammar):
    assert grammar.kind is GrammarKind.JSON_SCHEMA
    return json.loads(grammar.source)


@pytest.mark.parametrize("fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}},
                                    {"guided_json": None, "guided_choice": None}])  # fmt: skip
def test_any_text(fields):
    assert chat(**fields) is None


def test_json():
    assert chat(response_format={"type": "json_object"}) == Grammar(GrammarKind.JSON_OBJECT)
    assert chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}) == Grammar(
        GrammarKind.JSON_OBJECT
    )
    assert schema_of(chat(response_format=FORMAT)) == SCHEMA
    assert schema_of(chat(guided_json=SCHEMA)) == schema_of(chat(guided_json=json.dumps(SCHEMA))) == SCHEMA


def test_others():
    assert chat(guided_regex="a+") == Grammar(GrammarKind.REGEX, "a+")
    assert chat(guided_grammar='root ::= "a"') == Grammar(GrammarKind.LARK, 'root ::= "a"')
    assert json.loads(chat(guided_choice=["é", "b"]).source) == ["é", "b"]
    completion = parse_completion({"model": "m", "prompt": "x", "guided_regex": "a"})
    assert completion.to_request("r").grammar == Grammar(GrammarKind.REGEX, "a")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "need each other"),
        ({"response_format": {**FORMAT, "type": "json_object"}}, "response_format", "need each other"),
        ({"response_format": {**FORMAT, "schema": SCHEMA}}, "response_format", "not known"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_choice": [1]}, "guided_choice", "guided_choice[0]"),
        ({"guided_json": 3}, "guided_json", "guided_json"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "65,536 bytes, got 70,000"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "cannot be followed at once"),
    ],
)
def test_refusals(fields, param, words):
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert words in str(refused.value)


async def test_an_answer_follows_its_form(http):
    body = {"model": FAKE_NAME, "messages": MESSAGES, "guided_choice": ["red", "blue"]}
    answer = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("blue", "stop")
    body = {"model": FAKE_NAME, "prompt": "x", "response_format": FORMAT, "max_tokens": 200}
    text = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    assert json.loads(text) == {"a": 7}


async def test_a_form_that_cannot_be_enforced_is_refused_before_the_answer_begins(http):
    schema = {"type": "array", "uniqueItems": True}
    body = {"model": FAKE_NAME, "messages": MESSAGES, "stream": True, "guided_json": schema}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "guided_json"
    assert "'uniqueItems' at the top is not enforced" in error["message"]
