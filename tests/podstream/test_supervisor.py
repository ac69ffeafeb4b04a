"""The supervisor with two real processes: a replica around the fake engine, and the product's own gateway."""

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from podstream import liveness
from podstream import supervisor as supervisor_module
from podstream.child import Program, describe_exit
from podstream.liveness import grpc_answers
from podstream.serve import gateway_program, join_config
from podstream.supervisor import Backoff, StartFailed, Supervisor
from serving.config import EngineConfig, GatewayConfig
from serving.gateway.listener import base_url, listen
from tests.fakes import FAKE_NAME, echo, sse_events
from tests.podstream.processes import ENV, FAKE_REPLICA, ROOT, is_alive, running
from tests.podstream.test_programs import until_ready
from tests.services import until

pytestmark = pytest.mark.slow
COMPLETIONS = "/v1/completions"


class Service:
    """A supervisor in this process, running as a task."""

    def __init__(self, folder, listener, *fake_options, drain_s=5.0):
        config = join_config(EngineConfig("nowhere"), GatewayConfig(port=0, drain_s=drain_s), folder)
        arguments = ["replica", "nowhere", "--listen", config.replica.address, "--follow-parent"]
        argv = [*FAKE_REPLICA, *fake_options, "--", *arguments]
        replica = Program("replica", argv, ENV, answers=grpc_answers(config.replica.address))
        self.said = []
        self.http = httpx.AsyncClient(base_url=base_url(listener), timeout=20, trust_env=False)
        self.supervisor = Supervisor(replica, gateway_program(config, listener, ENV), drain_s, self.said.append)

    def pid(self, name):
        return self.supervisor.pid_of(name)

    async def run(self):
        await self.supervisor.run(until_ready(self.http))


@pytest.fixture
async def service():
    with tempfile.TemporaryDirectory(prefix="pod-") as folder, listen("127.0.0.1", 0) as listener:
        service = Service(Path(folder), listener)
        running = asyncio.create_task(service.run())
        await until(lambda: service.supervisor._was_ready, 15)
        yield service
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running, 15)
        await service.http.aclose()


def body(max_tokens=10, **fields):
    return {"model": FAKE_NAME, "prompt": "abc", "max_tokens": max_tokens, **fields}


async def until_not_ready(http):
    for _ in range(200):
        if (await http.get("/ready")).status_code != 200:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it stays ready")


async def test_a_killed_replica_is_replaced_and_nobody_hangs(service):
    http = service.http
    plain = asyncio.create_task(http.post(COMPLETIONS, json=body(500)))
    async with http.stream("POST", COMPLETIONS, json=body(500, stream=True)) as response:
        frames = response.aiter_text()
        await anext(frames)
        old = service.pid("replica")
        os.kill(old, signal.SIGKILL)
        rest = sse_events("".join([piece async for piece in frames]))
    assert rest[-1]["error"]["code"] == "replica_unavailable"
    assert (await plain).status_code == 503
    await until_not_ready(http)
    assert (await http.get("/health")).status_code == 200
    assert (await http.post(COMPLETIONS, json=body())).status_code == 503
    await until_ready(http)
    answer = (await http.post(COMPLETIONS, json=body())).json()
    assert answer["choices"][0]["text"] == echo("abc", 10)
    assert service.pid("replica") != old
    assert any("replica ended (killed by SIGKILL" in line for line in service.said)


async def test_a_killed_gateway_is_replaced_on_the_same_port(service):
    os.kill(service.pid("gateway"), signal.SIGKILL)
    await asyncio.sleep(0.1)
    answer = await service.http.post(COMPLETIONS, json=body())  # waits in the backlog of the socket that outlives it
    assert answer.status_code in (200, 503)
    await until_ready(service.http)


@pytest.fixture
def hurry(monkeypatch):
    monkeypatch.setattr(liveness, "ASK_S", 0.1)
    monkeypatch.setattr(liveness, "ANSWER_S", 1.0)


@pytest.mark.parametrize("name", ["replica", "gateway"])
async def test_what_does_not_answer_any_more_is_killed_and_replaced(hurry, service, name):
    await asyncio.sleep(1)  # it has answered: who has not yet may take longer
    frozen = service.pid(name)
    os.kill(frozen, signal.SIGSTOP)
    await until(lambda: service.pid(name) != frozen, 60)
    assert not is_alive(frozen)
    await until_ready(service.http, 60)
    assert f"the {name} does not answer any more and is killed" in service.said
    assert (await service.http.post(COMPLETIONS, json=body())).status_code == 200


async def test_a_signal_drains_both_in_order(service):
    http = service.http
    async with http.stream("POST", COMPLETIONS, json=body(150, stream=True)) as response:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.1)
        assert (await http.get("/ready")).status_code == 503
        events = sse_events((await response.aread()).decode())
    assert "".join(c["choices"][0]["text"] for c in events[:-1]) == echo("abc", 150)
    assert service.said[-1].startswith("stopping")


async def test_a_replica_that_cannot_start_ends_it_all(capfd):
    with tempfile.TemporaryDirectory(prefix="pod-") as folder, listen("127.0.0.1", 0) as listener:
        service = Service(Path(folder), listener, "--fail")
        with pytest.raises(StartFailed, match=r"the replica ended while it was starting \(exit code 1\)"):
            await asyncio.wait_for(service.run(), 15)
        await service.http.aclose()
    assert "the checkpoint has a hole." in capfd.readouterr().err
    assert not any(is_alive(service.pid(name)) for name in ("replica", "gateway"))


async def test_no_orphans_when_the_supervisor_is_killed():
    script = ROOT / "tests" / "podstream" / "fake_service.py"
    async with running([sys.executable, str(script)]) as supervisor:
        lines = [await asyncio.wait_for(supervisor.stdout.readline(), 15) for _ in range(2)]
        pids = [int(line) for line in lines]
        assert all(is_alive(pid) for pid in pids)
        supervisor.kill()
        await until(lambda: not any(is_alive(pid) for pid in pids), 10)


async def test_a_process_of_a_replica_that_does_not_end_with_the_others_is_killed(monkeypatch):
    """As one that is frozen: without it the others would wait for it whenever they are started again."""
    monkeypatch.setattr(supervisor_module, "END_TOGETHER_S", 0.5)
    said = []
    sleeping = (Program(name, ["sleep", "600"], ENV) for name in ("replica", "gateway", "replica's process 1"))
    replica, gateway, follower = sleeping
    supervisor = Supervisor(replica, gateway, 1.0, said.append, [follower])
    running = asyncio.create_task(supervisor.run(asyncio.sleep(0)))
    names = [replica.name, gateway.name, follower.name]
    await until(lambda: all(map(supervisor.pid_of, names)) and supervisor._was_ready, 10)
    old = {name: supervisor.pid_of(name) for name in names}
    os.kill(old[follower.name], signal.SIGSTOP)
    os.kill(old[replica.name], signal.SIGKILL)
    await until(lambda: all(supervisor.pid_of(name) != old[name] for name in (replica.name, follower.name)), 20)
    assert not is_alive(old[follower.name]) and supervisor.pid_of(gateway.name) == old[gateway.name]
    assert "the replica's process 1 did not end with it and is killed" in said
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 15)


def test_backoff_grows_and_is_forgotten_after_a_stable_life():
    backoff = Backoff()
    assert [backoff.delay_after(0.1) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    assert [backoff.delay_after(100), backoff.delay_after(0.1)] == [1, 2]


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit code 0"), (-15, "killed by SIGTERM"), (-9, "killed by SIGKILL, perhaps for want of memory")],
)
def test_how_a_process_ended_is_said_in_words(code, words):
    assert describe_exit(code) == words
