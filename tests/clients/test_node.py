"""OpenAI's client for Node, unmodified: fetched once per machine where there is Node and npm."""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from podstream.home import home
from tests.fakes import FAKE_NAME, FakeEngineLoop, echo, fake_card
from tests.services import EngineConfig, running_gateway, running_replica

FOLDER = home() / "node"
PACKAGE = FOLDER / "node_modules" / "openai" / "index.mjs"
SCRIPT = Path(__file__).with_name("openai_client.mjs")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("node") is None, reason="there is no node here"),
]


@pytest.fixture(scope="module")
def package():
    if not PACKAGE.exists() and (npm := shutil.which("npm")):
        command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(FOLDER), "openai@6"]
        subprocess.run(command, capture_output=True, timeout=120)
    if not PACKAGE.exists():
        pytest.skip(f"OpenAI's client for Node could not be fetched into {FOLDER}.")
    return PACKAGE


async def test_it_reads_what_it_asks_for(package):
    config = EngineConfig("nowhere", embeddings="mean")
    async with (
        running_replica(FakeEngineLoop(max_seq_len=2000), card=fake_card(), config=config) as replica,
        running_gateway(replica.address) as gateway,
    ):
        process = await asyncio.create_subprocess_exec(
            "node", str(SCRIPT), f"{gateway.url}/v1", stdout=-1, stderr=-1,
            env={**os.environ, "OPENAI_NODE": package.as_uri(), "NO_PROXY": "127.0.0.1"},
        )  # fmt: skip
        told, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    answer = json.loads(told)
    assert answer["whole"] == answer["streamed"] == "abcabca"
    assert answer["usage"] == 7
    assert (answer["called"]["name"], answer["reason"]) == ("look", "tool_calls")
    assert json.loads(answer["called"]["arguments"]) == {}
    assert [[round(number, 3) for number in vector] for vector in answer["embedded"]] == [[0.6, 0, 0.8], [0.8, 0, -0.6]]
    assert answer["response"] == echo("abc", 16)
    assert answer["then"] == echo("abc" + echo("abc", 16) + "x", 16)
    assert answer["refused"] == {"name": "NotFoundError", "status": 404, "code": "model_not_found"}
    assert answer["models"] == [FAKE_NAME]
