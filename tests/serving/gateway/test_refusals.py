"""Requests that cannot be served: the right status, OpenAI's error shape, a sentence with names and numbers."""

import asyncio

import pytest

from tests.fakes import FAKE_NAME, FakeEngineLoop
from tests.services import EngineConfig, running_gateway, running_replica

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "abc"}]


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    return error


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b"", b"\xff", b'{"a": NaN}', b'{"model": "\\ud800"}'])
async def test_a_body_that_is_no_json_object(http, body):
    error = error_of(await http.post(CHAT, content=body), 400)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages", "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages", "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "'image_url'"),
        ({"n": 17}, "n", "less than or equal to 16"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"priority": 1}, "priority", "'interactive' or 'batch'"),
        ({"best_of": 2}, "best_of", "not supported yet"),
        ({"logprobs": True, "top_logprobs": 100_000}, "top_logprobs", "less than or equal to 20"),
        ({"echo": True}, "echo", "not supported yet"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "stream=true"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        ({"logprobs": 2}, "logprobs", "boolean"),
        ({"logit_bias": {"5": 1e300}}, "logit_bias", "at most 100, got 1e+300"),
        ({"logit_bias": {"AI": -100}}, "logit_bias", "token ids, got 'AI'"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias", "outside the vocabulary of 257"),
        ({"logit_bias": {"99999999999": 1}}, "logit_bias", "token ids, got '99999999999'"),
        ({"logit_bias": {"5": "1"}}, "logit_bias", "token 5 must be a number"),
        ({"logit_bias": [5]}, "logit_bias", "must be an object"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "at most 300 tokens in logit_bias, got 301"),
        ({"logit_bias": {"5": 1, "05": 1}}, "logit_bias", "twice"),
        ({"banned_token_ids": list(range(129))}, "banned_token_ids", "at most 128 banned token ids, got 129"),
        ({"banned_token_ids": [257]}, "banned_token_ids", "outside the vocabulary"),
        ({"presence_penalty": 2.5}, "presence_penalty", "at most 2, got 2.5"),
        ({"frequency_penalty": -3}, "frequency_penalty", "at least -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "more than 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most max_tokens, 8, got 9"),
        ({"min_tokens": -1}, "min_tokens", "0 or more, got -1"),
        ({"temperature": 3}, "temperature", "at most 2, got 3"),
        ({"temperature": "1"}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "more than 0"),
        ({"max_tokens": 0}, "max_tokens", "1 or more"),
        ({"max_tokens": 2**40}, "max_tokens", "less than"),
        ({"stop": ["x"] * 17}, "stop", "16 stop strings, got 17"),
        ({"stop": ""}, "stop", "characters"),
        ({"seed": 2**64}, "seed", "seed"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids[0]"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"temprature": 0}, "temprature", "'temprature' is not known"),
        ({"model": None}, "model", "model"),
    ],
)
async def test_a_field_is_refused_by_name(http, fields, param, words):
    body = {"model": FAKE_NAME, "messages": MESSAGES, **fields}
    error = error_of(await http.post(CHAT, json=body), 400)
    assert words in error["message"]
    assert param is None or error["param"] == param


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 10**400, 1.5, "1", True])
async def test_a_seed_is_a_number_of_64_bits(http, seed):
    error = error_of(await http.post(COMPLETIONS, json={"model": FAKE_NAME, "prompt": "abc", "seed": seed}), 400)
    assert error["param"] in ("seed", None)  # None: no JSON parser here reads numbers of 400 digits


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), 0])
async def test_all_seeds_of_64_bits_are_welcome(http, seed):
    body = {"model": FAKE_NAME, "prompt": "abc", "seed": seed, "n": 2}
    assert (await http.post(COMPLETIONS, json=body)).status_code == 200


async def test_a_suffix_is_refused(http):
    body = {"model": FAKE_NAME, "prompt": "abc", "suffix": "def"}
    assert error_of(await http.post(COMPLETIONS, json=body), 400)["param"] == "suffix"


@pytest.mark.parametrize("wrong", [6, -1, True, "1"])
async def test_completions_tell_at_most_five_rivals(http, wrong):
    body = {"model": FAKE_NAME, "prompt": "abc", "logprobs": wrong}
    assert error_of(await http.post(COMPLETIONS, json=body), 400)["param"] == "logprobs"


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}},
        {"logprobs": False, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}},
        {"logprobs": None, "seed": None, "stop": None, "max_tokens": None, "stream": None, "top_k": -1},
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True},
    ],
)
async def test_fields_at_their_neutral_value_are_welcome(http, fields):
    response = await http.post(CHAT, json={"model": FAKE_NAME, "messages": MESSAGES, **fields})
    assert response.status_code == 200, response.text


async def test_an_assistant_message_may_be_sent_back_as_it_came(http):
    first = (await http.post(CHAT, json={"model": FAKE_NAME, "messages": MESSAGES})).json()
    messages = [*MESSAGES, first["choices"][0]["message"], {"role": "user", "content": "x"}]
    response = await http.post(CHAT, json={"model": FAKE_NAME, "messages": messages, "max_tokens": None})
    assert error_of(response, 400)["code"] == "context_length_exceeded"  # it is understood, and too long


async def test_an_unknown_model(http):
    error = error_of(await http.post(CHAT, json={"model": "gpt-9", "messages": MESSAGES}), 404)
    assert error["code"] == "model_not_found"
    assert "'gpt-9'" in error["message"]
    assert f"'{FAKE_NAME}'" in error["message"]


async def test_a_prompt_longer_than_the_context(http):
    error = error_of(await http.post(COMPLETIONS, json={"model": FAKE_NAME, "prompt": "x" * 1234}), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["message"] == "prompt has 1,234 tokens, the context holds 512 with the answer."


async def test_a_prompt_and_answer_longer_than_the_context(http):
    body = {"model": FAKE_NAME, "prompt": "x" * 500, "max_tokens": 100}
    error = error_of(await http.post(COMPLETIONS, json=body), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert "at most 12" in error["message"]


@pytest.mark.parametrize("ids", [[999_999_999], [-1], [[-1]], [65, 257]])
async def test_token_ids_outside_the_vocabulary(http, ids):
    error = error_of(await http.post(COMPLETIONS, json={"model": FAKE_NAME, "prompt": ids}), 400)
    assert "vocabulary of 257 tokens" in error["message"]


@pytest.mark.parametrize("prompt", ["", [], [[]]])
async def test_an_empty_prompt(http, prompt):
    error = error_of(await http.post(COMPLETIONS, json={"model": FAKE_NAME, "prompt": prompt}), 400)
    assert "empty" in error["message"]


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [1.5], [[[1]]], {"a": 1}, [2**70]])
async def test_a_prompt_of_another_shape(http, prompt):
    error_of(await http.post(COMPLETIONS, json={"model": FAKE_NAME, "prompt": prompt}), 400)


async def test_no_such_path_and_wrong_method(http):
    assert error_of(await http.get("/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(await http.get(CHAT), 405)["code"] == "method_not_allowed"


async def test_a_body_that_is_too_large(shared):
    async with running_gateway(shared.address, max_body_bytes=1000) as gateway:
        declared = await gateway.http.post(CHAT, content=b"x" * 1001)

        async def pieces():
            for _ in range(20):
                yield b"x" * 100

        undeclared = await gateway.http.post(CHAT, content=pieces())
    assert "1,000 bytes" in error_of(declared, 413)["message"]
    assert error_of(undeclared, 413)["code"] == "request_too_large"


async def test_a_stream_that_is_refused_has_the_proper_status(http):
    response = await http.post(CHAT, json={"model": "gpt-9", "messages": MESSAGES, "stream": True})
    error_of(response, 404)


async def test_a_full_gateway_says_when_to_come_back():
    engine = FakeEngineLoop()
    engine.go.clear()
    body = {"model": FAKE_NAME, "prompt": "abc"}
    async with running_replica(engine) as replica, running_gateway(replica.address, max_queued=1) as gateway:
        http = gateway.http
        async with http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as first:
            refused = await http.post(COMPLETIONS, json=body)
            engine.go.set()
            await first.aread()
        assert error_of(refused, 429)["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        await asyncio.sleep(int(refused.headers["retry-after"]))
        assert (await http.post(COMPLETIONS, json=body)).status_code == 200


async def test_a_full_replica_refuses_before_the_status_line():
    engine = FakeEngineLoop(num_slots=1)
    engine.go.clear()
    config = EngineConfig("nowhere", num_slots=1, max_waiting=1)
    body = {"model": FAKE_NAME, "prompt": "abc", "stream": True}
    async with running_replica(engine, config=config) as replica, running_gateway(replica.address) as gateway:
        http = gateway.http
        async with http.stream("POST", COMPLETIONS, json=body), http.stream("POST", COMPLETIONS, json=body):
            refused = await http.post(COMPLETIONS, json=body)
            engine.go.set()
    assert error_of(refused, 429)["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
