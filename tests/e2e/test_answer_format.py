"""Forms of answers, with the real model and the OpenAI SDK."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.grammars import is_valid

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 50_000_000},
        "capital": {"type": "boolean"},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2},
    },
    "required": ["city", "population", "capital", "rivers"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
MESSAGES = [{"role": "user", "content": "Describe Paris as JSON."}]


def ask(server, **fields):
    settings = {"temperature": 1.0, "max_tokens": 150, **fields}
    return server.client.chat.completions.create(model=server.model, messages=MESSAGES, **settings).choices[0]


def test_answers_satisfy_the_schema(server):
    with ThreadPoolExecutor(4) as pool:
        choices = list(pool.map(lambda seed: ask(server, response_format=FORMAT, seed=seed), range(4)))
    ended = [choice for choice in choices if choice.finish_reason == "stop"]
    assert ended
    assert all(is_valid(SCHEMA, json.loads(choice.message.content)) for choice in ended)


def test_a_neighbour_gets_the_answer_that_it_gets_alone(server):
    alone = ask(server, temperature=0, max_tokens=40).message.content
    with ThreadPoolExecutor(4) as pool:
        formed = [pool.submit(ask, server, response_format=FORMAT, seed=seed) for seed in range(3)]
        beside = ask(server, temperature=0, max_tokens=40).message.content
        assert all(future.result() for future in formed)
    assert beside == alone


def test_regex_and_choice(server):
    date = ask(server, extra_body={"guided_regex": r"[0-9]{4}-(0[1-9]|1[0-2])-[0-2][0-9]"})
    assert date.finish_reason == "stop"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date.message.content)
    assert ask(server, extra_body={"guided_choice": ["yes", "no"]}).message.content in ("yes", "no")


def test_what_cannot_be_enforced_is_refused(server):
    with pytest.raises(openai.BadRequestError, match="'uniqueItems' at the top is not enforced"):
        ask(server, extra_body={"guided_json": {"type": "array", "uniqueItems": True}})
