import asyncio
import io
import json
import shlex

from rich.console import Console

from podstream.startup import Startup, example_curl
from serving.replica.served import ServedModel
from tests.fakes import FAKE_NAME, FakeEngineLoop, fake_card
from tests.services import ENGINE_CONFIG, running_gateway, running_replica


async def test_it_tells_the_phases_and_then_how_to_try_it():
    console = Console(file=io.StringIO(), width=200)
    async with running_replica(load=False) as replica, running_gateway(replica.address, ready=False) as gateway:
        watching = asyncio.create_task(Startup(gateway.url, console).until_ready())
        replica.service.report("loading: 1 of 9 MiB")
        await asyncio.sleep(0.6)
        assert not watching.done()
        replica.service.serve(ServedModel.build(ENGINE_CONFIG, FakeEngineLoop(), fake_card()))
        await asyncio.wait_for(watching, 5)
    text = console.file.getvalue()
    assert "starting: loading: 1 of 9 MiB" in text
    assert f"ready: {FAKE_NAME} at {gateway.url}/v1" in text
    assert f"weights: {fake_card().source}\n" in text
    assert example_curl(gateway.url, FAKE_NAME) in text


def test_the_example_survives_a_shell():
    *_, body = shlex.split(example_curl("http://h:1", "it's"))
    assert json.loads(body)["model"] == "it's"
