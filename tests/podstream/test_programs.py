"""`podstream replica` and `podstream gateway` as processes: signals, draining, parents that die, bad starts."""

import asyncio
import signal
import socket
import tempfile

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.errors import ServiceError
from serving.replica.status import ReplicaState
from serving.replica.transport import open_channel
from serving.request import Request, SamplingParams, TextPrompt
from tests.fakes import FAKE_NAME, echo, sse_events
from tests.podstream.processes import end_of, gateway_argv, replica_argv, running
from tests.services import running_client, until

pytestmark = pytest.mark.slow
COMPLETIONS = "/v1/completions"


@pytest.fixture
def address():
    with tempfile.TemporaryDirectory(prefix="pod-") as folder:
        yield f"unix:{folder}/r.sock"


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
async def http(port):
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as client:
        yield client


async def until_ready(http, timeout_s=10):
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                if (await http.get("/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


def request(max_tokens):
    return Request("r", FAKE_NAME, TextPrompt("abc"), SamplingParams(max_tokens=max_tokens))


async def test_a_replica_tells_what_it_does_and_drains_on_sigterm(address):
    async with (
        running(replica_argv(address, "--load-s", "1")) as process,
        running_client(address, ready=False) as client,
    ):
        await until(lambda: client.status.detail == "loading echo: 1 of 2 MiB", 10)
        await until(lambda: client.ready)
        channel = open_channel(address)
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        await channel.close()
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        generation = client.generate(request(100))
        await anext(generation)
        ending = asyncio.create_task(end_of(process))
        text = "".join([event.text async for event in generation if hasattr(event, "text")])
        code, _ = await ending
    assert (text, code) == (echo("abc", 100), 0)


async def test_a_replica_cuts_what_does_not_finish_in_time(address):
    async with running(replica_argv(address, drain_s=0.2)) as process, running_client(address, ready=False) as client:
        await until(lambda: client.ready, 10)
        generation = client.generate(request(500))
        await anext(generation)
        code, errors = await end_of(process)
        with pytest.raises(Exception, match="went away"):
            async for _ in generation:
                pass
    assert code == 0
    assert "0.2 s were not enough" in errors


async def test_a_replica_that_cannot_load_says_why_in_one_sentence(address):
    async with running(replica_argv(address, "--fail")) as process:
        _, errors = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 1
    assert errors.decode().strip() == "the checkpoint has a hole."


async def test_a_replica_whose_engine_fails_says_so_and_ends(address):
    argv = replica_argv(address, "--break-after", "5")
    async with running(argv) as process, running_client(address, ready=False) as client:
        await until(lambda: client.ready, 10)
        generation = client.generate(request(500))
        with pytest.raises(ServiceError, match="fake engine failed"):
            async for _ in generation:
                pass
        await until(lambda: client.status.state is ReplicaState.FAILED)
        _, errors = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 1
    assert "the engine failed and the replica ends" in errors.decode()


async def test_a_replica_with_a_step_that_does_not_end_fails_its_requests_and_still_stops(address):
    argv = [*replica_argv(address, "--hang-after", "5"), "--stuck-s", "1"]
    async with running(argv) as process, running_client(address, ready=False) as client:
        await until(lambda: client.ready, 10)
        generation = client.generate(request(500))
        with pytest.raises(ServiceError, match="a step of the engine runs since 2 s and counts as stuck"):
            async with asyncio.timeout(15):
                async for _ in generation:
                    pass
        assert client.status.state is ReplicaState.STUCK
        code, errors = await end_of(process)
    assert (code, "Traceback" in errors) == (0, False)


async def test_a_frozen_replica_is_noticed_in_fifteen_seconds(address):
    async with running(replica_argv(address)) as process, running_client(address, ready=False) as client:
        await until(lambda: client.ready, 10)
        generation = client.generate(request(500))
        await anext(generation)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(ServiceError, match="went away while it answered"):
            async with asyncio.timeout(15):
                async for _ in generation:
                    pass
        assert not client.ready


async def test_a_replica_stops_while_it_loads(address):
    async with running(replica_argv(address, "--load-s", "60")) as process, running_client(address, ready=False) as c:
        await until(lambda: c.connected, 10)
        code, _ = await end_of(process, timeout_s=3)
    assert code == 0


async def test_two_replicas_cannot_have_one_port(port):
    argv = replica_argv(f"127.0.0.1:{port}")
    async with running(argv), running_client(f"127.0.0.1:{port}"), running(argv) as second:
        _, errors = await asyncio.wait_for(second.communicate(), 10)
    assert second.returncode == 1
    assert f"cannot listen at 127.0.0.1:{port}" in errors.decode()
    assert "Traceback" not in errors.decode()


async def test_a_replica_ends_with_its_parent(address):
    argv = [*replica_argv(address), "--follow-parent"]
    async with running(argv, stdin=asyncio.subprocess.PIPE) as process, running_client(address, ready=False) as client:
        await until(lambda: client.ready, 10)
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), 5) == 0


async def test_sigterm_lets_streams_finish_and_refuses_new_ones(address, port, http):
    async with running(replica_argv(address)), running(gateway_argv(address, port)) as gateway:
        await until_ready(http)
        body = {"model": FAKE_NAME, "prompt": "abc", "max_tokens": 150, "stream": True}
        async with http.stream("POST", COMPLETIONS, json=body) as response:
            gateway.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            ready = await http.get("/ready")
            refused = await http.post(COMPLETIONS, json=body)
            events = sse_events((await response.aread()).decode())
        code = await asyncio.wait_for(gateway.wait(), 5)
    assert ready.status_code == refused.status_code == 503
    assert "".join(c["choices"][0]["text"] for c in events[:-1]) == echo("abc", 150)
    assert (events[-1], code) == ("[DONE]", 0)


async def test_streams_that_do_not_finish_in_time_end_with_an_error_event(address, port, http):
    async with running(replica_argv(address)), running(gateway_argv(address, port, "--drain-s", "0.2")) as gateway:
        await until_ready(http)
        body = {"model": FAKE_NAME, "prompt": "abc", "max_tokens": 500, "stream": True}
        async with http.stream("POST", COMPLETIONS, json=body) as response:
            gateway.send_signal(signal.SIGTERM)
            events = sse_events((await response.aread()).decode())
        code = await asyncio.wait_for(gateway.wait(), 5)
    assert events[-1]["error"]["code"] == "replica_unavailable"
    assert code == 0


async def test_a_gateway_without_a_parent_lets_go_of_its_port_and_finishes_its_streams(address, port, http):
    orphan = [*gateway_argv(address, port, "--drain-s", "20"), "--follow-parent"]
    body = {"model": FAKE_NAME, "prompt": "abc", "max_tokens": 400, "stream": True}
    async with (
        running(replica_argv(address, "--step-delay-s", "0.02")),
        running(orphan, stdin=asyncio.subprocess.PIPE) as gateway,
    ):
        await until_ready(http)
        async with http.stream("POST", COMPLETIONS, json=body) as response:
            gateway.stdin.close()
            async with (
                running(gateway_argv(address, port)) as successor,
                httpx.AsyncClient(base_url=http.base_url, trust_env=False) as newcomer,
            ):
                await until_ready(newcomer)
                assert (
                    await newcomer.post(COMPLETIONS, json={**body, "max_tokens": 1, "stream": False})
                ).status_code == 200
                assert gateway.returncode is None and successor.returncode is None
                events = sse_events((await response.aread()).decode())
        assert await asyncio.wait_for(gateway.wait(), 10) == 0
    assert (events[-1], "".join(c["choices"][0]["text"] for c in events[:-1])) == ("[DONE]", echo("abc", 400))


async def test_a_gateway_on_a_port_in_use_says_so(port):
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        async with running(gateway_argv("127.0.0.1:9", port)) as process:
            _, errors = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 1
    assert errors.decode().strip() == (
        f"port {port} on 127.0.0.1 is in use by another program; choose another one with --port."
    )
