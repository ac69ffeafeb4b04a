"""A service that is full, or too slow for a deadline: told at once, before anything is computed."""

import asyncio
import itertools

import anyio
import openai
import pytest

from serving.gateway.admission.admission import Admission
from tests.fakes import FAKE_NAME, FakeEngineLoop
from tests.services import EngineConfig, running_gateway, running_replica, until

COMPLETIONS = "/v1/completions"
HURRY = 20  # times faster than real time


def body(**fields):
    return {"model": FAKE_NAME, "prompt": "abc", "max_tokens": 4, **fields}


@pytest.fixture
def engine():
    return FakeEngineLoop(num_slots=1)


async def occupied(gateway, engine):
    """One answer that runs; what comes now waits."""
    call = asyncio.create_task(gateway.http.post(COMPLETIONS, json=body()))
    engine.go.clear()
    await until(lambda: gateway.admission.num_in_flight == 1 and gateway.client.status.load.total_slots)
    return call


@pytest.mark.parametrize("stream", [True, False])
async def test_a_deadline_that_passes_in_the_queue_drops_the_request_before_prefill(gateway, engine, stream):
    engine.step_delay_s = 0.05
    first = asyncio.create_task(gateway.http.post(COMPLETIONS, json=body()))
    await until(lambda: engine.num_steps)
    late = await gateway.http.post(COMPLETIONS, json=body(stream=stream, deadline_ms=1) | {"prompt": "late"})
    assert late.status_code == 504, "not 200 with an error in the stream"
    assert late.json()["error"]["code"] == "deadline_exceeded"
    assert late.headers["x-should-retry"] == "false"
    assert (await first).status_code == 200
    assert engine.num_steps == 4, "no step was made for the late one"


async def test_a_deadline_that_cannot_be_met_is_refused_now(gateway, engine):
    first = await occupied(gateway, engine)
    waiting = [asyncio.create_task(gateway.http.post(COMPLETIONS, json=body())) for _ in range(5)]
    await until(lambda: gateway.admission.num_in_flight == 6)
    refused = await gateway.http.post(COMPLETIONS, json=body(deadline_ms=100))
    assert (refused.status_code, refused.json()["error"]["param"]) == (504, "deadline_ms")
    engine.go.set()
    assert {response.status_code for response in await asyncio.gather(first, *waiting)} == {200}


async def test_a_deadline_that_is_met_changes_nothing(http):
    plain, due = [await http.post(COMPLETIONS, json=body(**f)) for f in ({}, {"deadline_ms": 60_000})]
    assert plain.json()["choices"] == due.json()["choices"]
    streamed = await http.post(COMPLETIONS, json=body(deadline_ms=60_000, stream=True))
    assert streamed.text.endswith("data: [DONE]\n\n")


async def test_the_official_client_rides_through_a_burst(monkeypatch):
    """Ten times what the gateway takes, default retries; clocks and sleeps run HURRY times faster."""
    real_sleep = anyio.sleep
    monkeypatch.setattr(anyio, "sleep", lambda seconds: real_sleep(seconds / HURRY))
    engine = FakeEngineLoop(step_delay_s=0.002, num_slots=1)
    config = EngineConfig("nowhere", num_slots=1)
    async with (
        running_replica(engine, config=config) as replica,
        running_gateway(replica.address, max_queued=2) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client,
    ):
        hurry_admission(gateway.admission)
        answers = await asyncio.gather(*(client.completions.create(**body()) for _ in range(20)))
    assert [answer.choices[0].text for answer in answers] == ["abca"] * 20
    assert engine.num_tokens_made == 20 * 4, "the refused cost the engine nothing"


@pytest.mark.parametrize("warm", [False, True])
async def test_who_comes_back_when_told_is_served(warm):
    """Three times as many as there are places, all at once; each waits as it was told."""
    engine = FakeEngineLoop(step_delay_s=0.005, num_slots=4)
    config = EngineConfig("nowhere", num_slots=4)
    async with (
        running_replica(engine, config=config) as replica,
        running_gateway(replica.address, max_queued=20) as gateway,
    ):
        hurry_admission(gateway.admission)
        if warm:
            await asyncio.gather(*(gateway.http.post(COMPLETIONS, json=body()) for _ in range(16)))
        tries = await asyncio.gather(*(tries_until_served(gateway, f"abc{number}") for number in range(60)))
    assert tries.count(1) >= 20
    assert sum(count > 2 for count in tries) <= 0.05 * 40


async def tries_until_served(gateway, prompt) -> int:
    for count in itertools.count(1):
        response = await gateway.http.post(COMPLETIONS, json=body() | {"prompt": prompt})
        if response.status_code == 200:
            return count
        assert response.status_code == 429
        await asyncio.sleep(int(response.headers["retry-after"]) / HURRY)
    raise AssertionError


def hurry_admission(admission: Admission):
    clock = admission._clock
    admission._clock = lambda: HURRY * clock()
