"""Prompts of megabytes: refused before they are tokenized where they surely never fit, else in nobody's way."""

import asyncio
import dataclasses
import json
import time

import pytest

from serving.engine.tokenizer import Tokenizer
from tests.fakes import FAKE_NAME, fake_card
from tests.services import running_gateway, running_replica, until

LONG = "x" * (2 << 20)
UNBOUNDED = "e\u0301" + LONG[: 400 << 10]  # a tokenizer that composes these makes another text of it: no bound is known
SHORT = {"model": FAKE_NAME, "prompt": "abc", "max_tokens": 1}


def composing_card():
    card = fake_card()
    parts = json.loads(card.text.tokenizer_json) | {"normalizer": {"type": "NFC"}}
    return dataclasses.replace(card, text=dataclasses.replace(card.text, tokenizer_json=json.dumps(parts)))


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/v1/responses", {"input": LONG}, "messages"),
        ("/tokenize", {"prompt": LONG}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ],
)
async def test_what_surely_never_fits_is_refused_from_its_bytes(http, monkeypatch, path, fields, param):
    monkeypatch.setattr(Tokenizer, "_ids", None)  # nothing is tokenized
    response = await http.post(path, json={"model": FAKE_NAME, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert error["message"] == "prompt has at least 2,097,152 tokens, the context holds 512 with the answer."


@pytest.fixture
async def replica():
    async with running_replica(card=composing_card()) as running:
        yield running


async def test_six_that_must_be_tokenized_hold_up_no_short_one(replica):
    async with running_gateway(replica.address) as gateway:
        long = {"model": FAKE_NAME, "prompt": UNBOUNDED}
        asked = [asyncio.create_task(gateway.http.post("/v1/completions", json=long)) for _ in range(6)]
        await until(lambda: replica.service._lanes._turn.locked())
        started = time.monotonic()
        for _ in range(5):
            assert (await gateway.http.post("/v1/completions", json=SHORT)).status_code == 200
        assert time.monotonic() - started < 5
        answers = await asyncio.gather(*asked)
    assert {answer.json()["error"]["code"] for answer in answers} == {"context_length_exceeded"}


async def test_those_whose_client_has_left_are_not_tokenized(replica):
    lanes = replica.service._lanes
    async with running_gateway(replica.address) as gateway:
        asked = [asyncio.create_task(gateway.http.post("/tokenize", json={"prompt": UNBOUNDED})) for _ in range(4)]
        await until(lambda: lanes._num_long_bytes > 3 * len(UNBOUNDED))
        for each in asked:
            each.cancel()
        await until(lambda: lanes._num_long_bytes == 0)
        assert (await gateway.http.post("/v1/completions", json=SHORT)).status_code == 200
