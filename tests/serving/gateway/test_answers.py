"""The two endpoints, streamed and whole, as a plain HTTP client sees them."""

import asyncio

import httpx
import pytest

from tests.fakes import FAKE_NAME, FakeEngineLoop, echo, fake_card, sse_events
from tests.services import running_gateway, running_replica, until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat_body(text="abc", **fields):
    return {"model": FAKE_NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 7, **fields}


def completion_body(prompt="abc", **fields):
    return {"model": FAKE_NAME, "prompt": prompt, "max_tokens": 7, **fields}


async def test_a_chat_is_answered_whole(http):
    response = await http.post(CHAT, json=chat_body())
    answer = response.json()
    assert response.status_code == 200
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "abcabca", "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 7
    assert answer["usage"]["total_tokens"] == 10


async def test_a_chat_streams_role_text_end_and_done(http):
    response = await http.post(CHAT, json=chat_body(stream=True))
    *chunks, done = sse_events(response.text)
    assert response.headers["content-type"] == "text/event-stream"
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "abcabca"
    assert {c["id"] for c in chunks} == {chunks[0]["id"]}
    assert all("usage" not in c for c in chunks)


async def test_usage_comes_in_one_last_chunk_without_choices(http):
    response = await http.post(CHAT, json=chat_body(stream=True, stream_options={"include_usage": True}))
    *chunks, usage, _ = sse_events(response.text)
    assert all(c["usage"] is None for c in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, None])
async def test_no_usage_chunk_unless_asked(http, options):
    response = await http.post(CHAT, json=chat_body(stream=True, stream_options=options))
    assert all(c == "[DONE]" or c["choices"] for c in sse_events(response.text))


async def test_a_completion_streams_text(http):
    response = await http.post(COMPLETIONS, json=completion_body(stream=True))
    *chunks, _ = sse_events(response.text)
    assert {c["object"] for c in chunks} == {"text_completion"}
    assert "".join(c["choices"][0]["text"] for c in chunks) == "abcabca"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("prompt", ["Hi!", ["Hi!"], [72, 105, 33], [[72, 105, 33]]])
async def test_a_prompt_may_be_text_or_token_ids(http, prompt):
    answer = (await http.post(COMPLETIONS, json=completion_body(prompt))).json()
    assert answer["choices"][0]["text"] == "Hi!Hi!H"


async def test_one_text_part_equals_plain_content(http):
    parts = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]
    answer = (await http.post(CHAT, json=chat_body() | {"messages": parts})).json()
    assert answer["choices"][0]["message"]["content"] == "abcabca"


async def test_completions_stop_after_16_tokens_by_default(http):
    body = completion_body()
    del body["max_tokens"]
    assert (await http.post(COMPLETIONS, json=body)).json()["usage"]["completion_tokens"] == 16
    assert (await http.post(COMPLETIONS, json=body | {"max_tokens": None})).json()["usage"]["completion_tokens"] == 16


async def test_a_chat_fills_the_context_by_default(http, shared):
    answer = (await http.post(CHAT, json=chat_body(max_tokens=None))).json()
    assert answer["usage"]["total_tokens"] == shared.engine.max_seq_len


async def test_max_completion_tokens_wins(http):
    answer = (await http.post(CHAT, json=chat_body(max_completion_tokens=5))).json()
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (5, "length")


@pytest.mark.parametrize("stop", ["bca", ["x", "bca"]])
async def test_a_stop_string_ends_the_answer_before_it(own_http, engine, stop):
    answer = (await own_http.post(CHAT, json=chat_body("abcd abca", stop=stop, max_tokens=400))).json()
    assert answer["choices"][0]["message"]["content"] == "abcd a"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 9
    await until(lambda: engine.aborted)


@pytest.mark.parametrize("stop", [None, [], "zzz"])
async def test_without_a_stop_met_the_answer_is_complete(http, stop):
    answer = (await http.post(CHAT, json=chat_body(stop=stop))).json()
    assert answer["choices"][0]["message"]["content"] == "abcabca"


async def test_the_end_token_ends_the_answer_and_is_not_shown(http):
    answer = (await http.post(COMPLETIONS, json=completion_body([72, 105, 256], max_tokens=50))).json()
    assert answer["choices"][0] == {"index": 0, "text": "Hi", "logprobs": None, "finish_reason": "stop"}
    assert answer["usage"]["completion_tokens"] == 3


async def test_ignore_eos_goes_on_without_showing_it(http):
    answer = (await http.post(COMPLETIONS, json=completion_body([72, 105, 256], ignore_eos=True))).json()
    assert answer["choices"][0]["text"] == "HiHiH"
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_stop_token_is_counted_but_not_shown(http):
    answer = (await http.post(COMPLETIONS, json=completion_body("abc", stop_token_ids=[99]))).json()
    assert answer["choices"][0]["text"] == "ab"
    assert answer["usage"]["completion_tokens"] == 3


async def test_characters_are_never_cut(http):
    text = "🙂漢é"
    response = await http.post(COMPLETIONS, json=completion_body(text, max_tokens=20, stream=True))
    pieces = [c["choices"][0]["text"] for c in sse_events(response.text)[:-1]]
    assert "".join(pieces) == echo(text, 20)
    assert all("\ufffd" not in piece for piece in pieces[:-2])


async def test_recommended_sampling_fills_only_what_is_unset():
    engine = FakeEngineLoop()
    seen = []
    submit = engine.submit
    engine.submit = lambda request: (seen.append(request.sampling), submit(request))
    card = fake_card(temperature=0.6, top_p=0.9, top_k=40, min_p=0.25, repetition_penalty=1.5)
    async with running_replica(engine, card=card) as replica, running_gateway(replica.address) as gateway:
        await gateway.http.post(COMPLETIONS, json=completion_body())
        await gateway.http.post(COMPLETIONS, json=completion_body(temperature=0, top_k=-1))
        await gateway.http.post(COMPLETIONS, json=completion_body(min_p=0, repetition_penalty=1))
    assert (seen[0].temperature, round(seen[0].top_p, 3), seen[0].top_k) == (0.6, 0.9, 40)
    assert (seen[1].temperature, round(seen[1].top_p, 3), seen[1].top_k) == (0.0, 0.9, 0)
    assert [(each.min_p, each.repetition_penalty) for each in seen] == [(0.25, 1.5), (0.25, 1.5), (0.0, 1.0)]


async def test_a_salt_reaches_the_engine(http, shared, monkeypatch):
    seen, submit = [], shared.engine.submit
    monkeypatch.setattr(shared.engine, "submit", lambda request: (seen.append(request.cache_salt), submit(request)))
    await http.post(COMPLETIONS, json=completion_body())
    await http.post(CHAT, json=chat_body(cache_salt="tenant"))
    assert seen == ["", "tenant"]


async def test_request_ids_may_repeat(http):
    """The engine's own ids differ, so that one client's habit does not mix up two answers."""
    headers = {"x-request-id": "same"}
    calls = [http.post(COMPLETIONS, json=completion_body(text), headers=headers) for text in ("abc", "xyz")]
    answers = [response.json()["choices"][0]["text"] for response in await asyncio.gather(*calls)]
    assert answers == ["abcabca", "xyzxyzx"]


async def test_text_arrives_while_the_answer_is_made(gateway, engine):
    engine.step_delay_s = 0.02
    async with gateway.http.stream("POST", COMPLETIONS, json=completion_body(stream=True)) as response:
        pieces = [piece async for piece in response.aiter_text()]
    assert len(pieces) >= 5


async def test_http_pipelines_stay_usable_after_an_error(shared_gateway):
    async with httpx.AsyncClient(base_url=shared_gateway.url, limits=httpx.Limits(max_connections=1)) as client:
        assert (await client.post(CHAT, content=b"{")).status_code == 400
        assert (await client.post(CHAT, json=chat_body())).status_code == 200
