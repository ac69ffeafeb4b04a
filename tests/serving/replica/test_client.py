import asyncio
import time

import pytest

from serving.errors import ModelNotFound, ReplicaUnavailable
from serving.replica.client import ReplicaClient
from serving.replica.events import Accepted, Delta, Finished
from serving.replica.inbox import Inbox
from serving.request import FinishReason, Request, SamplingParams, TextPrompt, Usage
from tests.fakes import FAKE_NAME, FakeEngineLoop, echo
from tests.services import running_client, running_replica, until


def request(prompt="abc", max_tokens=5, model=FAKE_NAME):
    return Request("r", model, TextPrompt(prompt), SamplingParams(max_tokens=max_tokens))


async def test_events_come_in_order():
    async with running_replica() as replica, running_client(replica.address) as client:
        events = [event async for event in client.generate(request())]
    assert events[0] == Accepted(prompt_tokens=3)
    assert "".join(event.text for event in events[1:-1]) == "abcab"
    assert events[-1] == Finished(FinishReason.LENGTH, Usage(3, 5), phases=events[-1].phases)
    assert (events[-1].phases.queue_s, events[-1].phases.prefill_s) == (0.25, 0.5)
    assert client.num_in_flight == 0


async def test_an_error_is_raised():
    async with running_replica() as replica, running_client(replica.address) as client:
        with pytest.raises(ModelNotFound):
            await anext(client.generate(request(model="gpt-9")))


async def test_closing_frees_the_slot():
    engine = FakeEngineLoop(step_delay_s=0.002)
    async with running_replica(engine) as replica, running_client(replica.address) as client:
        generation = client.generate(request(max_tokens=400))
        await anext(generation)
        generation.close()
        generation.close()
        await until(lambda: engine.aborted)
        with pytest.raises(StopAsyncIteration):
            await anext(generation)
    assert client.num_in_flight == 0


async def test_a_reader_that_dawdles_gets_joined_text():
    engine = FakeEngineLoop()
    async with running_replica(engine) as replica, running_client(replica.address) as client:
        generation = client.generate(request(max_tokens=300))
        assert isinstance(await anext(generation), Accepted)
        await until(lambda: engine.num_steps == 300 and client.num_in_flight == 0)
        assert await anext(generation) == Delta(echo("abc", 300), 300)
        assert isinstance(await anext(generation), Finished)


async def test_without_a_replica_a_request_fails_at_once():
    async with running_client("127.0.0.1:9", ready=False) as client:
        with pytest.raises(ReplicaUnavailable, match=r"127\.0\.0\.1:9"):
            client.generate(request())
        with pytest.raises(ReplicaUnavailable, match="does not answer"):
            await client.fetch_status()


async def test_a_break_ends_everything_in_flight_and_the_client_comes_back():
    engine = FakeEngineLoop(step_delay_s=0.002)
    async with running_replica(engine) as first, running_client(first.address) as client:
        generations = [client.generate(request(max_tokens=400)) for _ in range(20)]
        await asyncio.gather(*(anext(generation) for generation in generations))
        await first.server.stop(0)
        for generation in generations:
            with pytest.raises(ReplicaUnavailable, match="went away"):
                async for _ in generation:
                    pass
        assert not client.ready
        async with running_replica(address=first.address):
            await until(lambda: client.ready)
            events = [event async for event in client.generate(request())]
            assert isinstance(events[-1], Finished)


async def test_closing_the_client_ends_what_is_in_flight():
    engine = FakeEngineLoop(step_delay_s=0.002)
    async with running_replica(engine) as replica:
        async with running_client(replica.address) as client:
            generation = client.generate(request(max_tokens=400))
            await anext(generation)
        with pytest.raises(ReplicaUnavailable, match="shutting down"):
            async for _ in generation:
                pass
        await until(lambda: engine.aborted)


async def test_closing_ends_the_client_at_any_moment_of_its_search_for_a_replica():
    """gRPC swallows the cancellation of a task whose call is just being set up, if there is nobody to call."""
    for moment in range(250):
        client = ReplicaClient("unix:/nowhere/replica.sock")
        client.start()
        until_s = time.perf_counter() + moment * 16e-6  # finer than a loop's timers
        while time.perf_counter() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.wait_for(client.close(), 5)


async def test_an_abort_that_nobody_asked_for_is_an_error():
    engine = FakeEngineLoop(step_delay_s=0.002)
    async with running_replica(engine) as replica, running_client(replica.address) as client:
        generation = client.generate(request(max_tokens=400))
        await anext(generation)
        (engine_id,) = replica.service._table._running
        engine.abort(engine_id)
        with pytest.raises(ReplicaUnavailable, match="stopped before"):
            async for _ in generation:
                pass


async def test_status_is_fetched():
    async with running_replica() as replica, running_client(replica.address) as client:
        status = await client.fetch_status()
    assert (status.ready, status.model, status.load.total_slots) == (True, FAKE_NAME, 64)


def test_the_first_end_counts():
    inbox = Inbox()
    end = Finished(FinishReason.STOP, Usage())
    inbox.end(end)
    inbox.end(ReplicaUnavailable("late"))
    assert inbox.take() == end
