"""`echo` and `prompt_logprobs`: the prompt is told before the answer, in OpenAI's and in vLLM's shape."""

import pytest

from serving.request import MAX_PROMPT_NUMBERS
from tests.fakes import FAKE_NAME, FakeEngineLoop, sse_events
from tests.services import running_app, running_replica

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def body(prompt="abé", **fields):
    return {"model": FAKE_NAME, "prompt": prompt, "max_tokens": 2, **fields}


async def answer(http, path, fields):
    response = await http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(http, fields):
    *chunks, done = sse_events((await http.post(COMPLETIONS, json=fields | {"stream": True})).text)
    assert done == "[DONE]"
    return [choice for chunk in chunks for choice in chunk["choices"]]


async def test_echo_puts_the_prompt_before_the_answer(http):
    got = await answer(http, COMPLETIONS, body(echo=True))
    assert (got["choices"][0]["text"], got["choices"][0]["logprobs"]) == ("abéab", None)
    assert (got["usage"]["prompt_tokens"], got["usage"]["completion_tokens"]) == (4, 2)
    assert "".join(c["text"] for c in await streamed(http, body(echo=True))) == "abéab"
    assert (await answer(http, COMPLETIONS, body(echo=False)))["choices"][0]["text"] == "ab"


async def test_echo_with_logprobs_begins_with_null(http):
    [choice] = (await answer(http, COMPLETIONS, body(echo=True, logprobs=1)))["choices"]
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "bytes:\\xc3", "bytes:\\xa9", "a", "b"],
        "token_logprobs": [None, -0.125, -0.25, -0.375, -0.125, -0.25],
        "top_logprobs": [
            None,
            {"b": -0.125},
            {"bytes:\\xc3": -0.25},
            {"bytes:\\xa9": -0.375},
            {"a": -0.125},
            {"b": -0.25},
        ],
        "text_offset": [0, 1, 2, 2, 3, 4],
    }


@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 0}, {"logprobs": 2}, {"logprobs": 1, "stop": "b"}, {"n": 2, "logprobs": 1}]
)
@pytest.mark.parametrize("prompt", ["abé", "a", "bab"])
async def test_streamed_equals_plain(http, prompt, fields):
    asked = body(prompt, echo=True, max_tokens=5, seed=1, **fields)
    for whole in (await answer(http, COMPLETIONS, asked))["choices"]:
        chunks = [c for c in await streamed(http, asked) if c["index"] == whole["index"]]
        assert "".join(c["text"] for c in chunks) == whole["text"]
        parts = [c["logprobs"] for c in chunks if c["logprobs"]]
        if whole["logprobs"] is None:
            assert not parts
        else:
            joined = {name: [x for part in parts for x in part[name]] for name in whole["logprobs"]}
            assert joined == whole["logprobs"]
            assert whole["text"].startswith(prompt) and joined["token_logprobs"][0] is None


async def test_no_token_at_all_may_be_asked_for(http):
    got = await answer(http, COMPLETIONS, body(echo=True, logprobs=0, max_tokens=0))
    assert (got["choices"][0]["text"], got["choices"][0]["finish_reason"]) == ("abé", "length")
    assert len(got["choices"][0]["logprobs"]["tokens"]) == 4
    assert got["usage"]["completion_tokens"] == 0
    assert (await http.post(COMPLETIONS, json=body(max_tokens=0))).status_code == 400


async def test_prompt_logprobs_are_those_of_vllm(http):
    expected = [
        None,
        {
            "98": {"logprob": -0.125, "rank": 1, "decoded_token": "b"},
            "97": {"logprob": -0.25, "rank": 2, "decoded_token": "a"},
        },
        {
            "99": {"logprob": -0.25, "rank": 2, "decoded_token": "c"},
            "98": {"logprob": -0.375, "rank": 2, "decoded_token": "b"},
        },
    ]
    [choice] = (await answer(http, COMPLETIONS, body("abc", prompt_logprobs=2)))["choices"]
    assert (choice["prompt_logprobs"], choice["text"], choice["logprobs"]) == (expected, "ab", None)
    chat = {"model": FAKE_NAME, "messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}
    got = await answer(http, CHAT, {**chat, "prompt_logprobs": 2, "n": 2})
    assert got["prompt_logprobs"] == expected
    assert [c["message"]["content"] for c in got["choices"]] == ["ab", "ab"]
    assert "prompt_logprobs" not in await answer(http, CHAT, chat)
    [alone] = (await answer(http, COMPLETIONS, body("a", prompt_logprobs=2)))["choices"]
    assert alone["prompt_logprobs"] == [None]


async def test_more_rivals_for_the_one_than_for_the_other(http):
    [choice] = (await answer(http, COMPLETIONS, body("abc", echo=True, logprobs=1, prompt_logprobs=3)))["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [1] * 4
    assert [len(top) for top in choice["prompt_logprobs"][1:]] == [3] * 2


async def test_too_many_numbers_are_refused():
    engine = FakeEngineLoop(max_seq_len=MAX_PROMPT_NUMBERS)
    async with running_replica(engine) as replica, running_app(replica.address) as http:
        response = await http.post(COMPLETIONS, json=body([65] * 15_000, prompt_logprobs=20, n=2))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")
        assert "630,000 log-probabilities in all answers, at most 500,000" in response.json()["error"]["message"]
