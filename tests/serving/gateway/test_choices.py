"""n > 1: several answers to one prompt, whole and streamed, with one usage and one end."""

import asyncio

import pytest

from serving.request import FinishReason, choice_seed
from tests.fakes import FAKE_NAME, FakeEngineLoop, sse_events
from tests.services import EngineConfig, running_gateway, running_replica, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXTS = ["bcdabcd", "cdabcda", "dabcdab"]


def body(**fields):
    return {"model": FAKE_NAME, "prompt": "abcd", "max_tokens": 7, "n": 3, "seed": 1, **fields}


def chat_body(**fields):
    messages = {"messages": [{"role": "user", "content": "abcd"}]}
    return {name: value for name, value in body(**fields).items() if name != "prompt"} | messages


def streamed(events, index, read):
    return "".join(read(c) for e in events for c in e["choices"] if c["index"] == index)


@pytest.mark.parametrize(("path", "fields"), [(CHAT, chat_body()), (COMPLETIONS, body())])
async def test_choices_are_what_single_requests_get(http, path, fields):
    answer = (await http.post(path, json=fields)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for index, choice in enumerate(answer["choices"]):
        alone = (await http.post(path, json={**fields, "n": 1, "seed": choice_seed(1, index)})).json()
        assert choice == {**alone["choices"][0], "index": index}
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 21, 25)


async def test_streams_say_whose_text_it_is(http):
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    *events, usage, done = sse_events((await http.post(CHAT, json=chat_body(**fields))).text)
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == ([], 4, 21)
    for index, text in enumerate(TEXTS):
        mine = [c for e in events for c in e["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == text
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
    *events, done = sse_events((await http.post(COMPLETIONS, json=body(stream=True))).text)
    assert [streamed(events, i, lambda c: c["text"]) for i in range(3)] == TEXTS


async def test_each_choice_stops_by_itself_and_has_its_own_logprobs(http):
    answer = (await http.post(COMPLETIONS, json=body(stop="cd", logprobs=0))).json()
    assert [c["text"] for c in answer["choices"]] == ["b", "", "dab"]
    assert [c["finish_reason"] for c in answer["choices"]] == ["stop"] * 3
    assert ["".join(c["logprobs"]["tokens"]) for c in answer["choices"]] == ["b", "", "dab"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_all_of_them(stream):
    engine = FakeEngineLoop(step_delay_s=0.005)
    async with running_replica(engine) as replica, running_gateway(replica.address) as gateway:
        call = asyncio.create_task(gateway.http.post(COMPLETIONS, json=body(stream=stream, max_tokens=400)))
        await until(lambda: engine.num_steps > 3)
        call.cancel()
        await asyncio.wait([call])
        await until(lambda: len(engine.aborted) == 3)
        await until(lambda: gateway.admission.num_in_flight == 0)
        assert gateway.client.num_in_flight == 0


async def test_one_that_fails_takes_the_others_with_it(caplog):
    engine = FakeEngineLoop(step_delay_s=0.005)
    async with running_replica(engine) as replica, running_gateway(replica.address) as gateway:
        async with gateway.http.stream("POST", COMPLETIONS, json=body(stream=True, max_tokens=400)) as response:
            await until(lambda: replica.service._table.num_requests == 3 and engine.num_steps > 3)
            broken = sorted(replica.service._table._running.values(), key=lambda running: running.handle)[1]
            broken.answer._detokenizer = None
            events = sse_events((await response.aread()).decode())
        assert events[-1]["error"]["code"] == "engine_failed" and "[DONE]" not in events
        await until(lambda: len(engine.aborted) == 3)
        assert not any(c["finish_reason"] for e in events[:-1] for c in e["choices"])


async def test_all_need_a_place_or_none_gets_one():
    engine = FakeEngineLoop(num_slots=2)
    config = EngineConfig("nowhere", num_slots=2, max_waiting=2)
    async with running_replica(engine, config=config) as replica, running_gateway(replica.address) as gateway:
        refused = await gateway.http.post(COMPLETIONS, json=body(n=5))
        served = await gateway.http.post(COMPLETIONS, json=body(n=4))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert [c["finish_reason"] for c in served.json()["choices"]] == [FinishReason.LENGTH] * 4


async def test_a_prompt_that_is_refused_is_refused_once(http):
    response = await http.post(COMPLETIONS, json=body(prompt="x" * 1234, stream=True))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_one_request_is_counted(gateway):
    await gateway.http.post(COMPLETIONS, json=body())
    metrics = (await gateway.http.get("/metrics")).text
    labels = f'{{engine="0",model_name="{FAKE_NAME}"}}'
    assert f"vllm:e2e_request_latency_seconds_count{labels} 1.0" in metrics
    assert f"vllm:time_to_first_token_seconds_count{labels} 1.0" in metrics
    assert f"vllm:request_generation_tokens_sum{labels} 21.0" in metrics
    assert f"vllm:request_prompt_tokens_sum{labels} 4.0" in metrics


def test_seeds_go_around_the_end():
    assert [choice_seed(2**63 - 1, i) for i in range(2)] == [2**63 - 1, -(2**63)]
    assert choice_seed(None, 3) is None
