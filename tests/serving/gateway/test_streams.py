"""Streams under stress: clients that leave, clients that dawdle, crowds, and a replica that goes away."""

import asyncio
import gc
import weakref

import pytest

from serving.gateway.call import Call
from serving.gateway.pump import Pump, TextLane
from serving.replica.inbox import Inbox
from tests.fakes import FAKE_NAME, FakeEngineLoop, echo, sse_events
from tests.services import EngineConfig, running_gateway, running_replica, until

COMPLETIONS = "/v1/completions"


def body(prompt="abc", **fields):
    return {"model": FAKE_NAME, "prompt": prompt, "max_tokens": 400, **fields}


@pytest.fixture
def engine():
    return FakeEngineLoop(step_delay_s=0.005)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_slot(gateway, engine, stream):
    call = asyncio.create_task(gateway.http.post(COMPLETIONS, json=body(stream=stream)))
    await until(lambda: engine.num_steps > 3)
    call.cancel()
    await asyncio.wait([call])
    left_at = engine.num_steps
    await until(lambda: engine.aborted)
    assert min(engine.aborted.values()) <= left_at + 20  # a step takes 5 ms here; the news travels two hops
    await until(lambda: gateway.admission.num_in_flight == 0)
    assert gateway.client.num_in_flight == 0


async def test_a_client_that_leaves_before_the_first_token(gateway, engine):
    engine.go.clear()
    call = asyncio.create_task(gateway.http.post(COMPLETIONS, json=body(stream=True)))
    await until(lambda: engine.load.num_waiting == 1)
    call.cancel()
    await asyncio.wait([call])
    await until(lambda: gateway.admission.num_in_flight == 0)
    engine.go.set()
    await until(lambda: engine.aborted)


async def test_a_slow_reader_gets_all_the_text_and_holds_up_nobody(gateway, engine):
    engine.step_delay_s = 0.001
    async with gateway.http.stream("POST", COMPLETIONS, json=body(stream=True)) as slow:
        quick = await gateway.http.post(COMPLETIONS, json=body("xyz"))
        await asyncio.sleep(0.2)
        text = (await slow.aread()).decode()
    assert quick.json()["choices"][0]["text"] == echo("xyz", 400)
    assert "".join(c["choices"][0]["text"] for c in sse_events(text)[:-1]) == echo("abc", 400)


async def test_a_hundred_streams_get_their_own_text():
    engine = FakeEngineLoop(num_slots=100)
    config = EngineConfig("nowhere", num_slots=100)
    prompts = [f"<{number}>" for number in range(100)]
    async with running_replica(engine, config=config) as replica, running_gateway(replica.address) as gateway:
        calls = [gateway.http.post(COMPLETIONS, json=body(p, stream=True, max_tokens=10)) for p in prompts]
        responses = await asyncio.gather(*calls)
    for prompt, response in zip(prompts, responses, strict=True):
        assert "".join(c["choices"][0]["text"] for c in sse_events(response.text)[:-1]) == echo(prompt, 10)


async def test_what_a_request_leaves_behind_needs_no_collector(gateway, engine, monkeypatch):
    """It looks rarely in the gateway: what only it can free would pile up."""
    engine.step_delay_s, made, left = 0, [], weakref.WeakSet()

    def watch(kind, make):
        def init(self, *arguments, **fields):
            make(self, *arguments, **fields)
            made.append(kind)
            left.add(self)

        monkeypatch.setattr(kind, "__init__", init)

    for kind in (Pump, TextLane, Call, Inbox):
        watch(kind, kind.__init__)
    gc.disable()
    try:
        for stream in (True, False):
            await gateway.http.post(COMPLETIONS, json=body(stream=stream, max_tokens=3))
        await until(lambda: not left)
    finally:
        gc.enable()
    assert set(made) == {Pump, TextLane, Call, Inbox}


async def test_a_replica_that_goes_away_ends_streams_with_an_error_event(gateway, replica):
    async with gateway.http.stream("POST", COMPLETIONS, json=body(stream=True)) as response:
        frames = response.aiter_text()
        await anext(frames)
        await replica.server.stop(0)
        rest = sse_events("".join([piece async for piece in frames]))
    assert rest[-1]["error"]["code"] == "replica_unavailable"
    assert "[DONE]" not in rest
    assert not any(c.get("choices") and c["choices"][0]["finish_reason"] for c in rest)


async def test_a_replica_that_goes_away_fails_plain_requests(gateway, replica, engine):
    call = asyncio.create_task(gateway.http.post(COMPLETIONS, json=body()))
    await until(lambda: engine.num_steps > 3)
    await replica.server.stop(0)
    response = await call
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "replica_unavailable"
    ready = await gateway.http.get("/ready")
    assert ready.status_code == 503
    assert (await gateway.http.get("/health")).status_code == 200


async def test_a_restarted_replica_serves_again():
    async with running_replica() as first, running_gateway(first.address) as gateway:
        await first.server.stop(0)
        await until(lambda: not gateway.client.ready)
        refused = await gateway.http.post(COMPLETIONS, json=body())
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        async with running_replica(address=first.address):
            await until(lambda: gateway.client.ready)
            assert (await gateway.http.post(COMPLETIONS, json=body("hi"))).status_code == 200


async def test_an_engine_that_fails_ends_streams_with_an_error_event(gateway, engine):
    async with gateway.http.stream("POST", COMPLETIONS, json=body(stream=True)) as response:
        frames = response.aiter_text()
        await anext(frames)
        engine.fail()
        rest = sse_events("".join([piece async for piece in frames]))
    assert rest[-1]["error"]["code"] == "engine_failed"


async def test_a_draining_gateway_finishes_its_streams_and_refuses_new_ones(gateway, engine):
    async with gateway.http.stream("POST", COMPLETIONS, json=body(stream=True, max_tokens=50)) as response:
        gateway.admission.drain()
        refused = await gateway.http.post(COMPLETIONS, json=body())
        ready = await gateway.http.get("/ready")
        events = sse_events((await response.aread()).decode())
    assert refused.status_code == ready.status_code == 503
    assert events[-1] == "[DONE]"
    assert await gateway.admission.emptied(1)
