"""`podstream profile` against a replica with the fake engine, and against nobody."""

import asyncio
import io

import pytest
from rich.console import Console

from podstream.profile import ProfileFailed, find_replica, profile
from serving.request import Request, SamplingParams, TextPrompt
from tests.fakes import FAKE_NAME, FakeEngineLoop
from tests.services import running_gateway, running_replica


async def run(steps, folder, **where):
    console = Console(file=io.StringIO(), width=200)
    settings = {"replica": None, "url": "http://127.0.0.1:9", "wait_s": 5.0, **where}
    await asyncio.to_thread(profile, steps, folder, console=console, **settings)
    return console.file.getvalue()


async def test_the_replica_behind_a_gateway_is_traced():
    engine = FakeEngineLoop(step_delay_s=0.002)
    async with running_replica(engine) as replica, running_gateway(replica.address) as gateway:
        answer = gateway.client.generate(Request("r", FAKE_NAME, TextPrompt("abc"), SamplingParams(max_tokens=500)))
        shown = await run(20, "one", url=gateway.url)
        answer.close()
    assert replica.address in shown
    assert "steps are in /traces/one" in shown
    ((folder, first, last),) = engine.traces
    assert folder == "/traces/one"
    assert last - first >= 20


async def test_an_idle_replica_is_said():
    async with running_replica() as replica:
        with pytest.raises(ProfileFailed, match=r"no step ran in 0\.05 s"):
            await run(20, "one", replica=replica.address, wait_s=0.05)


async def test_what_the_replica_refuses_is_shown():
    async with running_replica() as replica:
        with pytest.raises(ProfileFailed, match="1 to 1,000 steps, got 5,000"):
            await run(5000, "one", replica=replica.address)


async def test_nobody_there_is_one_clear_sentence():
    with pytest.raises(ProfileFailed, match=r"nothing answers at http://127.0.0.1:9 .*--replica"):
        await run(1, "one")
    with pytest.raises(ProfileFailed, match=r"no replica answers at 127.0.0.1:9;"):
        await run(1, "one", replica="127.0.0.1:9")


def test_a_page_without_a_replica_is_said(httpx_page):
    with pytest.raises(ProfileFailed, match="tells of 0 replicas"):
        find_replica(httpx_page)


@pytest.fixture
def httpx_page(monkeypatch):
    """A gateway of another kind."""
    import httpx

    monkeypatch.setattr(
        httpx, "get", lambda url, **_: httpx.Response(200, text="up 1\n", request=httpx.Request("GET", url))
    )
    return "http://other"
