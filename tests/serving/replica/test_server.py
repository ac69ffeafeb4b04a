"""The service seen from its wire: streams that break, gateways that do not read, draining, overload."""

import asyncio
import sys
import threading
from collections import Counter, defaultdict
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from serving.engine.build import TILE_TOKENS
from serving.engine.grammar import GrammarCompiler
from serving.engine.loop import MAX_FAILURES, EngineThread
from serving.engine.plan import Limits
from serving.replica import convert
from serving.replica.proto import replica_pb2 as pb
from serving.replica.proto.replica_pb2_grpc import ReplicaStub
from serving.replica.transport import open_channel
from serving.request import Request, SamplingParams, TextPrompt
from tests.engines import PAGE_SIZE, counting_engine
from tests.fakes import FAKE_NAME, FakeEngineLoop, echo
from tests.services import EngineConfig, running_replica, until

ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def raw_stream(address):
    channel = open_channel(address)
    call = ReplicaStub(channel).Generate()
    try:
        yield call
    finally:
        call.cancel()
        await channel.close()


def submit(handle, prompt="abc", max_tokens=5, **fields):
    request = Request(f"r{handle}", FAKE_NAME, TextPrompt(prompt), SamplingParams(max_tokens=max_tokens))
    packed = convert.submit_to_pb(handle, request)
    packed.MergeFrom(pb.Submit(**fields))
    return packed


async def read_until_finished(call, handles):
    """What was said meanwhile, by handle: accepted count, text, finished list."""
    said = defaultdict(lambda: [0, "", []])
    while not all(said[handle][2] for handle in handles):
        batch = await call.read()
        for accepted in batch.accepted:
            said[accepted.handle][0] += 1
        for delta in batch.deltas:
            said[delta.handle][1] += delta.text
        for finished in batch.finished:
            said[finished.handle][2].append(finished)
    return said


async def test_the_first_message_tells_the_status():
    async with running_replica() as replica, raw_stream(replica.address) as call:
        batch = await call.read()
        assert (batch.status.state, batch.status.model, batch.status.max_seq_len) == ("ready", FAKE_NAME, 512)


async def test_requests_of_one_stream_end_once_each():
    async with running_replica() as replica, raw_stream(replica.address) as call:
        await call.write(pb.ClientBatch(submits=[submit(handle, f"<{handle}>") for handle in range(50)]))
        said = await read_until_finished(call, range(50))
    for handle, (accepted, text, finished) in said.items():
        assert (accepted, text, len(finished)) == (1, echo(f"<{handle}>", 5), 1)
        assert (finished[0].reason, finished[0].completion_tokens) == ("length", 5)


async def test_a_refused_request_is_not_accepted():
    async with running_replica() as replica, raw_stream(replica.address) as call:
        await call.write(pb.ClientBatch(submits=[submit(1, model="gpt-9"), submit(2, "")]))
        said = await read_until_finished(call, [1, 2])
    assert [(accepted, finished[0].error.code) for accepted, _, finished in said.values()] == [
        (0, "model_not_found"),
        (0, "invalid_value"),
    ]


async def test_submit_and_cancel_in_one_message_end_once():
    async with running_replica() as replica, raw_stream(replica.address) as call:
        await call.write(pb.ClientBatch(submits=[submit(1, max_tokens=400)], cancels=[1, 1, 99]))
        said = await read_until_finished(call, [1])
        await until(lambda: replica.service._num_requests() == 0)
    assert [f.reason for f in said[1][2]] == ["abort"]


async def test_a_cancel_ends_a_running_request_once():
    engine = FakeEngineLoop(step_delay_s=0.002)
    async with running_replica(engine) as replica, raw_stream(replica.address) as call:
        await call.write(pb.ClientBatch(submits=[submit(1, max_tokens=400)]))
        await until(lambda: engine.num_steps > 2)
        await call.write(pb.ClientBatch(cancels=[1]))
        said = await read_until_finished(call, [1])
    assert [f.reason for f in said[1][2]] == ["abort"]
    assert engine.num_steps < 400


async def test_a_broken_stream_frees_all_its_requests_and_only_those():
    engine = FakeEngineLoop(step_delay_s=0.002)
    async with running_replica(engine) as replica, raw_stream(replica.address) as other:
        engine.go.clear()  # nothing ends before all are there
        async with raw_stream(replica.address) as call:
            await call.write(pb.ClientBatch(submits=[submit(handle, max_tokens=500) for handle in range(8)]))
            await other.write(pb.ClientBatch(submits=[submit(1, max_tokens=60)]))
            await until(lambda: replica.service._table.num_requests == 9)  # none is being read any more
        engine.go.set()
        await until(lambda: len(engine.aborted) == 8)
        said = await read_until_finished(other, [1])
    assert said[1][1] == echo("abc", 60)


async def test_a_killed_gateway_leaves_nothing_behind():
    """gRPC cancels a handler more than once when the peer dies rather than leaves."""
    code = "import asyncio, sys; from tests.services import running_client\n"
    code += "async def main():\n    async with running_client(sys.argv[1]):\n        await asyncio.sleep(60)\n"
    code += "asyncio.run(main())"
    async with running_replica() as replica:
        gateway = await asyncio.create_subprocess_exec(sys.executable, "-c", code, replica.address, cwd=ROOT)
        await until(lambda: replica.service._streams, 10)
        gateway.kill()
        await gateway.wait()
        await until(lambda: not replica.service._streams)
        replica.service.drain()
        await asyncio.wait_for(replica.service.drained(), 1)


async def test_a_gateway_that_does_not_read_makes_nothing_grow():
    engine = FakeEngineLoop(num_slots=200, max_seq_len=4096)
    config = EngineConfig("nowhere", num_slots=200)
    async with running_replica(engine, config=config) as replica, raw_stream(replica.address) as call:
        prompts = [submit(handle, "x" * 50, max_tokens=500) for handle in range(100)]
        await call.write(pb.ClientBatch(submits=prompts))
        await until(lambda: replica.service._num_requests() == 0 and engine.num_steps >= 500, timeout_s=30)
        (stream,) = replica.service._streams
        assert len(stream.outbox._texts) <= 100
        said = await read_until_finished(call, range(100))
    assert all(text == "x" * 500 for _, text, _ in said.values())


async def test_a_handle_in_use_is_not_given_away(caplog):
    """Nor does a request whose handles are no numbers of the protocol hurt those of the same step."""
    engine = FakeEngineLoop(step_delay_s=0.001)
    twice = [submit(1, "<1>", max_tokens=20), submit(1, "<2>"), submit(2, "<3>")]
    overlapping = [submit(0, "<4>", num_choices=2), submit(1, "<5>"), submit((1 << 64) - 2, "<6>", num_choices=4)]
    async with running_replica(engine) as replica, raw_stream(replica.address) as call:
        await call.write(pb.ClientBatch(submits=twice))
        await until(lambda: engine.num_steps > 1)  # the first one is running
        await call.write(pb.ClientBatch(submits=overlapping))
        largest = [(1 << 64) - 2, (1 << 64) - 1]
        said = await read_until_finished(call, [0, 1, 2, *largest])
        await until(lambda: replica.service._num_requests() == 0)
    assert (said[1][1], said[2][1]) == (echo("<1>", 20), echo("<3>", 5))
    ends = {handle: [(end.reason, end.error.code) for end in ended] for handle, (_, _, ended) in said.items()}
    refused = [("error", "invalid_value")]
    assert ends == {1: [("length", "")], 2: [("length", "")], 0: refused, largest[0]: refused, largest[1]: refused}
    assert len([record for record in caplog.records if "are in use or too large" in record.message]) == 4
    assert not tracebacks(caplog)


def tracebacks(caplog):
    return [record for record in caplog.records if record.exc_info or "Traceback" in record.message]


async def test_a_message_of_another_protocol_ends_its_stream_only(caplog):
    async with running_replica() as replica, raw_stream(replica.address) as other:
        async with open_channel(replica.address) as channel:
            call = channel.stream_stream("/podstream.replica.v1.Replica/Generate")()
            await call.write(b"\xff\xff\xff")
            async with asyncio.timeout(5):
                with pytest.raises(grpc.aio.AioRpcError, match="none of this protocol"):
                    while True:
                        await call.read()
        await other.write(pb.ClientBatch(submits=[submit(1)]))
        assert (await read_until_finished(other, [1]))[1][1] == echo("abc", 5)
    assert not tracebacks(caplog)


async def test_a_handle_is_free_again_when_its_request_has_ended():
    async with running_replica() as replica, raw_stream(replica.address) as call:
        for _ in range(2):
            await call.write(pb.ClientBatch(submits=[submit(1)]))
            assert (await read_until_finished(call, [1]))[1][1] == echo("abc", 5)


async def test_draining_refuses_new_requests_and_finishes_running_ones():
    engine = FakeEngineLoop(step_delay_s=0.002)
    async with running_replica(engine) as replica, raw_stream(replica.address) as call:
        await call.write(pb.ClientBatch(submits=[submit(1, max_tokens=50)]))
        await until(lambda: engine.num_steps > 2)
        channel = open_channel(replica.address)
        assert (await ReplicaStub(channel).Drain(pb.DrainRequest())).state == "draining"
        await channel.close()
        await call.write(pb.ClientBatch(submits=[submit(2)]))
        said = await read_until_finished(call, [1, 2])
        await asyncio.wait_for(replica.service.drained(), 2)
    assert (said[1][1], said[1][2][0].reason) == (echo("abc", 50), "length")
    assert said[2][2][0].error.code == "replica_unavailable"


async def test_more_requests_than_places_are_refused():
    engine = FakeEngineLoop(num_slots=1)
    engine.go.clear()
    config = EngineConfig("nowhere", num_slots=1, max_waiting=2)
    async with running_replica(engine, config=config) as replica, raw_stream(replica.address) as call:
        await call.write(pb.ClientBatch(submits=[submit(handle) for handle in range(4)]))
        refused = await read_until_finished(call, [3])
        engine.go.set()
        served = await read_until_finished(call, [0, 1, 2])
    assert refused[3][2][0].error.code == "queue_full"
    assert [served[handle][2][0].reason for handle in range(3)] == ["length"] * 3


async def test_a_crowd_of_grammars_holds_up_nobody_else(monkeypatch):
    compiled = threading.Event()
    monkeypatch.setattr(GrammarCompiler, "compile", lambda *_, **__: compiled.wait(10) and None)
    grammars = [submit(handle, grammar=pb.Grammar(kind="regex", source="a")) for handle in range(1, 9)]
    async with running_replica() as replica, raw_stream(replica.address) as call:
        await call.write(pb.ClientBatch(submits=[*grammars, submit(9)]))
        assert await read_until_finished(call, [9])
        compiled.set()
        await read_until_finished(call, range(1, 9))


async def test_thousands_wait_and_most_of_them_give_up():
    """On one stream. What is over the limit is refused, and each ends once. (The engine's own test has 10,000.)"""
    engine = FakeEngineLoop(num_slots=64)
    engine.go.clear()
    config = EngineConfig("nowhere", num_slots=64, max_waiting=1_900)
    async with running_replica(engine, config=config) as replica, raw_stream(replica.address) as call:
        for start in range(0, 2_000, 500):
            await call.write(pb.ClientBatch(submits=[submit(h, max_tokens=2) for h in range(start, start + 500)]))
        num_accepted, ends = 0, Counter()
        while num_accepted + ends.total() < 2_000:
            batch = await call.read()
            num_accepted += len(batch.accepted)
            ends += Counter(finished.reason for finished in batch.finished)
        assert (num_accepted, ends) == (1_964, {"error": 36})
        await call.write(pb.ClientBatch(cancels=range(400, 2_000)))
        engine.go.set()
        while ends.total() < 2_000:
            ends += Counter(finished.reason for finished in (await call.read()).finished)
        await until(lambda: replica.service._num_requests() == 0)
    assert ends["length"] + ends["abort"] == 1_964 and ends["length"] >= 400


async def test_an_engine_that_fails_fails_its_requests():
    engine = FakeEngineLoop(step_delay_s=0.002)
    async with running_replica(engine) as replica, raw_stream(replica.address) as call:
        await call.write(pb.ClientBatch(submits=[submit(1, max_tokens=400)]))
        await until(lambda: engine.num_steps > 2)
        engine.fail()
        said = await read_until_finished(call, [1])
        await asyncio.wait_for(replica.service.engine_failed(), 2)
    assert said[1][2][0].error.code == "engine_failed"


async def test_a_failing_step_fails_what_had_begun_and_the_next_request_is_answered(tmp_path):
    """A real engine in its thread, over steps that need no device."""
    engine = counting_engine(Limits(PAGE_SIZE, TILE_TOKENS, 2))
    loop = EngineThread(engine, lambda: 0, tmp_path)
    async with running_replica(loop) as replica, raw_stream(replica.address) as call:
        await call.write(pb.ClientBatch(submits=[submit(1)]))
        before = await read_until_finished(call, [1])
        engine._programs.num_to_fail = 1
        await call.write(pb.ClientBatch(submits=[submit(2)]))
        failed = await read_until_finished(call, [2])
        await call.write(pb.ClientBatch(submits=[submit(3)]))
        after = await read_until_finished(call, [3])
        engine._programs.num_to_fail = MAX_FAILURES
        for handle in range(4, 4 + MAX_FAILURES):
            await call.write(pb.ClientBatch(submits=[submit(handle)]))
            await read_until_finished(call, [handle])
        await asyncio.wait_for(replica.service.engine_failed(), 2)
    assert (failed[2][2][0].error.code, len(failed[2][2])) == ("engine_failed", 1)
    assert "device lost" in failed[2][2][0].error.message
    assert after[3][1] == before[1][1] and after[3][2][0].reason == "length"


async def test_one_answer_without_text_does_not_harm_the_others(caplog):
    engine = FakeEngineLoop(step_delay_s=0.002)
    async with running_replica(engine) as replica, raw_stream(replica.address) as call:
        await call.write(pb.ClientBatch(submits=[submit(1, max_tokens=60), submit(2, max_tokens=60)]))
        await until(lambda: replica.service._table.num_requests == 2)
        broken = next(r for r in replica.service._table._running.values() if r.handle == 1)
        broken.answer._detokenizer = None
        said = await read_until_finished(call, [1, 2])
    assert said[1][2][0].error.code == "engine_failed"
    assert said[2][1] == echo("abc", 60)
    assert "could not be turned into text" in caplog.text


@pytest.mark.parametrize("field", [{"sampling": pb.Sampling(temperature=9)}, {"messages_json": "{"}])
async def test_a_request_out_of_range_is_refused_alone(field):
    async with running_replica() as replica, raw_stream(replica.address) as call:
        await call.write(pb.ClientBatch(submits=[submit(1, **field), submit(2)]))
        said = await read_until_finished(call, [1, 2])
    assert said[1][2][0].error.code == "invalid_value"
    assert said[2][2][0].reason == "length"
