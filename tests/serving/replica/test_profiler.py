"""A trace covers the steps that were asked for, and is stopped whatever happens."""

import asyncio

import grpc
import pytest

from serving.errors import InvalidRequest, Overloaded
from serving.replica.profiler import Profiler
from serving.replica.proto import replica_pb2 as pb
from serving.replica.proto.replica_pb2_grpc import ReplicaStub
from serving.replica.transport import open_channel
from tests.fakes import FakeEngineLoop
from tests.services import running_replica, until


class Steps:
    def __init__(self):
        self.engine = FakeEngineLoop()
        self.profiler = Profiler(self.engine, lambda: self.engine.num_steps, "/traces")

    def begin(self, steps, wait_s=10.0):
        return asyncio.create_task(self.profiler.trace(steps, "one", wait_s))


async def test_a_trace_ends_when_its_steps_have_run():
    steps = Steps()
    steps.engine.num_steps = 7
    tracing = steps.begin(3)
    await until(lambda: steps.engine.traces)
    await asyncio.sleep(0.02)
    assert not tracing.done()
    steps.engine.num_steps = 10
    assert await tracing == (3, "/traces/one")
    assert steps.engine.traces == [["/traces/one", 7, 10]]


async def test_one_trace_at_a_time():
    steps = Steps()
    tracing = steps.begin(1)
    await until(lambda: steps.engine.traces)
    with pytest.raises(Overloaded, match="another trace"):
        await steps.profiler.trace(1, "two", 1.0)
    steps.engine.num_steps = 1
    await tracing
    steps.engine.num_steps = 2
    assert (await steps.begin(1, wait_s=0.01))[0] == 0


async def test_a_trace_that_nobody_waits_for_is_stopped():
    steps = Steps()
    tracing = steps.begin(5)
    await until(lambda: steps.engine.traces)
    await asyncio.sleep(0.01)
    tracing.cancel()
    await until(lambda: steps.engine.traces[0][2] is not None)
    await until(lambda: not steps.profiler._busy)


async def test_a_trace_that_cannot_start_leaves_the_way_free():
    steps = Steps()
    with pytest.raises(InvalidRequest, match="disk is full"):
        await steps.profiler.trace(1, "full", 1.0)
    assert (await steps.begin(1, wait_s=0.01))[0] == 0


@pytest.mark.parametrize(
    ("wish", "reason"),
    [((0, "x", 1.0), "1 to 1,000 steps"), ((1001, "x", 1.0), "1 to 1,000"), ((1, "x", 0.0), "up to 600 s"),
     ((1, "x", float("nan")), "up to 600 s")]
    + [((1, name, 1.0), "no path") for name in ("", "/etc", "..", "../x", "a/b", ".ssh", "gs://b", "a\n", "x" * 101)],
)  # fmt: skip
async def test_impossible_wishes_are_refused(wish, reason):
    with pytest.raises(InvalidRequest, match=reason):
        await Steps().profiler.trace(*wish)


async def test_refusals_cross_the_wire():
    async with running_replica(load=False) as replica, open_channel(replica.address) as channel:
        replica.service.report("loading")
        with pytest.raises(grpc.aio.AioRpcError, match="the replica is starting: loading") as refused:
            await ReplicaStub(channel).Profile(pb.ProfileRequest(steps=1, name="x", wait_s=1))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_without_a_folder_for_traces_nothing_is_written():
    engine = FakeEngineLoop()
    with pytest.raises(InvalidRequest, match="start the replica with --profile-dir DIR"):
        await Profiler(engine, lambda: 0, None).trace(1, "x", 1.0)
    assert not engine.traces
