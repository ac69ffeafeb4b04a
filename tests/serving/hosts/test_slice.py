"""Real processes that share a mesh: they answer as one process does, read only their own shards, and end together."""

import asyncio
import os
import re
import signal
import sys
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from serving.config import EngineConfig
from serving.engine.build import build_engine
from serving.errors import ServiceError
from serving.replica.events import Delta, Finished
from serving.request import FinishReason, Grammar, GrammarKind, Request, SamplingParams, TextPrompt
from tests.engines import KEPT
from tests.fakes import sse_events
from tests.flags import XLA_FLAGS
from tests.model_files import LLAMA3
from tests.podstream.processes import ENV, is_alive, running
from tests.services import running_client, running_replica, until
from tests.slices import places

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]
MESH = "tensor=4"
SIZES = {
    "num_slots": 1,
    "chunk_tokens": 32,
    "max_seq_len": 128,
    "page_size": 4,
}  # two programs, which each host compiles
FLAGS = ("--mesh", MESH, "--slots", "1", "--chunk-tokens", "32", "--max-seq-len", "128", "--page-size", "4")
HOST_ENV = {**ENV, "XLA_FLAGS": XLA_FLAGS}
MODEL = LLAMA3.name
PROMPT = "the cat sat on the mat and went on " * 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
COUNTED = SamplingParams(temperature=0.0, max_tokens=12, presence_penalty=2.0)
REQUESTS = [
    Request("greedy", MODEL, TextPrompt(PROMPT), GREEDY),
    Request("seeded", MODEL, TextPrompt("a dog"), SamplingParams(seed=7, max_tokens=24, ignore_eos=True, top_k=50)),
    Request("logprobs", MODEL, TextPrompt("once"), SamplingParams(temperature=0.0, max_tokens=4, logprobs=2)),
    Request("penalties", MODEL, TextPrompt("so so so"), COUNTED),
    Request("form", MODEL, TextPrompt("yes or no?"), GREEDY, grammar=Grammar(GrammarKind.CHOICE, '["yes", "no"]')),
]
LONG = Request("long", MODEL, TextPrompt("the"), SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))


async def answer(client, request):
    """Text, end and log-probabilities."""
    events = [event async for event in client.generate(request)]
    deltas = [event for event in events if isinstance(event, Delta)]
    told = [(entry.token, pytest.approx(entry.logprob, abs=1e-4)) for delta in deltas for entry in delta.logprobs]
    [finished] = [event for event in events if isinstance(event, Finished)]
    return "".join(delta.text for delta in deltas), finished.reason, told


async def answers(address):
    async with running_client(address, ready=False) as client:
        await until(lambda: client.ready, 100)
        return await asyncio.gather(*(answer(client, request) for request in REQUESTS))


@asynccontextmanager
async def slice_of(count, folder):
    """The processes of one replica, and its address."""
    address = f"unix:{folder}/replica.sock"
    async with AsyncExitStack() as stack:
        hosts = []
        for place in places(count, join_s=60):
            argv = [sys.executable, "-m", "podstream", "replica", str(LLAMA3), "--listen", address, *FLAGS,
                    "--coordinator", place.coordinator, "--num-processes", str(count),
                    "--process-id", str(place.process_id), "--compile-cache", KEPT]  # fmt: skip
            hosts.append(await stack.enter_async_context(running(argv, env=HOST_ENV)))
        yield hosts, address


@pytest.fixture(scope="module")
def expected():
    """What one process answers, whose four devices have the same mesh."""
    config = EngineConfig(str(LLAMA3), mesh=MESH, compile_cache=KEPT, **SIZES)
    loop, card = build_engine(config, lambda _: None)

    async def ask():
        async with running_replica(loop, card=card, config=config) as one:
            return await answers(one.address)

    return asyncio.run(ask())


async def test_four_processes_answer_as_one_and_end_with_each_other(expected):
    assert expected[0][1] is FinishReason.LENGTH
    with tempfile.TemporaryDirectory(prefix="pod-") as folder:
        async with slice_of(4, folder) as (hosts, address):
            assert await answers(address) == expected
            async with running_client(address) as client:
                generation = client.generate(LONG)
                await anext(generation)
                hosts[2].kill()
                began = asyncio.get_running_loop().time()
                with pytest.raises(ServiceError, match=r"host 2 \(.*\) is lost: it closed its connection"):
                    async for _ in generation:
                        pass
                assert asyncio.get_running_loop().time() - began < 5
            ends = await asyncio.wait_for(asyncio.gather(*(host.communicate() for host in hosts)), 10)
    assert [host.returncode for host in hosts] == [1, 1, -signal.SIGKILL, 1]
    for host in (0, 1, 3):
        assert "the hosts cannot go on" in (words := ends[host][1].decode())
        assert "host 2 (" in words


def pids_of(process):
    """Of the replica's processes, by number."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in children}
    replicas = {pid: line for pid, line in lines.items() if "\0replica\0" in line}
    return {int((re.search("--process-id\0(\\d+)", line) or [0, 0])[1]): pid for pid, line in replicas.items()}


async def ready(http):
    try:
        return (await http.get("/ready")).status_code == 200
    except httpx.TransportError:
        return False


async def until_ready(http, is_ready=True):
    for _ in range(1000):
        if await ready(http) == is_ready:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it does not become ready")


async def text_of(http, body):
    [choice] = (await http.post("/v1/completions", json=body)).json()["choices"]
    return choice["text"]


async def test_a_supervised_slice_of_two_is_started_again(expected):
    """Each process has two devices."""
    port = places(2)[0].coordinator_address[1]
    argv = [sys.executable, "-m", "podstream", "serve", str(LLAMA3), "--port", str(port), "--num-processes", "2",
            *FLAGS, "--compile-cache", KEPT]  # fmt: skip
    greedy = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    long = {**greedy, "prompt": "the", "max_tokens": 100, "stream": True}
    async with (
        running(argv, env=HOST_ENV) as supervisor,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http,
    ):
        await until_ready(http)
        assert await text_of(http, greedy) == expected[0][0]
        old = pids_of(supervisor)
        async with http.stream("POST", "/v1/completions", json=long) as response:
            frames = response.aiter_text()
            await anext(frames)
            os.kill(old[1], signal.SIGKILL)
            rest = sse_events("".join([piece async for piece in frames]))
        assert "host 1" in rest[-1]["error"]["message"]
        await until_ready(http, is_ready=False)
        await until_ready(http)
        assert {0, 1} == pids_of(supervisor).keys()
        assert not any(is_alive(pid) for pid in old.values())
        assert await text_of(http, greedy) == expected[0][0]
        supervisor.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(supervisor.wait(), 20) == 0
