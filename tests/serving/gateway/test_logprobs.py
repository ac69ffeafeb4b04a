"""Log-probabilities over HTTP: OpenAI's shapes, and the stream joined is the plain answer."""

import pytest

from serving.gateway.logprobs import completion_logprobs, token_text
from serving.replica.events import TokenLogprob
from tests.fakes import FAKE_NAME, sse_events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def plain(http, url, body):
    response = await http.post(url, json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def streamed(http, url, body):
    *chunks, done = sse_events((await http.post(url, json=body | {"stream": True})).text)
    assert done == "[DONE]"
    return [chunk["choices"][0] for chunk in chunks]


def chat(text="aé", **fields):
    return {"model": FAKE_NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


async def test_chat(http):
    choice = await plain(http, CHAT, chat(logprobs=True, top_logprobs=2))
    assert choice["message"]["content"] == "aéa"
    content = choice["logprobs"]["content"]
    assert content[0] == {
        "token": "a",
        "logprob": -0.125,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.125, "bytes": [97]},
            {"token": "`", "logprob": -0.25, "bytes": [96]},
        ],
    }
    assert [entry["token"] for entry in content] == ["a", "bytes:\\xc3", "bytes:\\xa9", "a"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "aéa"


async def test_completion(http):
    body = {"model": FAKE_NAME, "prompt": "abé", "max_tokens": 5, "logprobs": 1}
    assert (await plain(http, COMPLETIONS, body))["logprobs"] == {
        "tokens": ["a", "b", "bytes:\\xc3", "bytes:\\xa9", "a"],
        "token_logprobs": [-0.125, -0.25, -0.375, -0.5, -0.625],
        "top_logprobs": [{"a": -0.125}, {"b": -0.25}, {"bytes:\\xc3": -0.375}, {"bytes:\\xa9": -0.5}, {"a": -0.625}],
        "text_offset": [0, 1, 2, 2, 3],
    }


@pytest.mark.parametrize("stop", [None, "a", "bé", "éx", "é"])
async def test_streamed_equals_plain(http, stop):
    fields = {"max_tokens": 9, "stop": stop}
    whole = await plain(http, CHAT, chat("xabé", logprobs=True, top_logprobs=1, **fields))
    chunks = await streamed(http, CHAT, chat("xabé", logprobs=True, top_logprobs=1, **fields))
    joined = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert joined == whole["logprobs"]["content"]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == whole["message"]["content"]

    body = {"model": FAKE_NAME, "prompt": "xabé", "logprobs": 2, **fields}
    whole = await plain(http, COMPLETIONS, body)
    parts = [chunk["logprobs"] for chunk in await streamed(http, COMPLETIONS, body) if chunk["logprobs"]]
    assert {name: [x for part in parts for x in part[name]] for name in whole["logprobs"]} == whole["logprobs"]


async def test_nobody_who_did_not_ask_gets_any(http):
    assert (await plain(http, CHAT, chat()))["logprobs"] is None
    assert (await plain(http, CHAT, chat(logprobs=False)))["logprobs"] is None
    assert all(chunk["logprobs"] is None for chunk in await streamed(http, CHAT, chat()))


async def test_asked_without_rivals(http):
    content = (await plain(http, CHAT, chat(logprobs=True)))["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[]] * 4
    body = {"model": FAKE_NAME, "prompt": "ab", "max_tokens": 1, "logprobs": 0}
    assert (await plain(http, COMPLETIONS, body))["logprobs"]["top_logprobs"] == [{"a": -0.125}]


def test_the_chosen_token_is_always_among_the_top_of_a_completion():
    shown = completion_logprobs([TokenLogprob(b"z", -4.0, 0, ((b"a", -0.5),)), TokenLogprob(b"z", float("-inf"), 1)])
    assert shown["top_logprobs"] == [{"a": -0.5, "z": -4.0}, {"z": -9999.0}]


def test_tokens_that_are_no_text_look_different():
    assert [token_text(t) for t in (b" a", b"\xe2\x82", b"\xe2\x83")] == [" a", "bytes:\\xe2\\x82", "bytes:\\xe2\\x83"]
