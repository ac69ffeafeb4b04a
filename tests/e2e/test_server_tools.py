"""The README's file of tools, run: a second gateway reads it, in front of the same replica and the real model."""

import asyncio
import json
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import clean_environment, free_port
from tests.e2e.test_faults import eventually

pytestmark = pytest.mark.e2e

README = (Path(__file__).parents[2] / "README.md").read_text()
(EXAMPLE,) = [text for text in re.findall(r"```toml\n(.*?)```", README, re.DOTALL) if "[[tool]]" in text]
RESULT = "It is 7 degrees and it rains."


@contextmanager
def gateway(server, *flags):
    """`podstream gateway` before the replica of the shared server; its URL."""
    figures = httpx.get(f"{server.url}/metrics").text
    replica = re.search(r'podstream:replica_info{address="([^"]+)"}', figures)[1]
    port = free_port()
    command = [sys.executable, "-m", "podstream", "gateway", "--replica", replica, "--port", str(port),
               "--drain-s", "0", *flags]  # fmt: skip
    process = subprocess.Popen(command, env=clean_environment())
    try:
        eventually(lambda: _is_ready(f"http://127.0.0.1:{port}/ready"))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def _is_ready(url):
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


async def test_the_readmes_tool_is_run_and_the_prompt_is_not_computed_again(server, tmp_path):
    asked = []

    async def answer(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(re.search(r"content-length: (\d+)", head)[1])
        asked.append((head, json.loads(await reader.readexactly(length))))
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(RESULT)}\r\n\r\n{RESULT}".encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as tool:
        file = tmp_path / "tools.toml"
        port = tool.sockets[0].getsockname()[1]
        assert EXAMPLE.count("127.0.0.1:9100") == 1
        file.write_text(EXAMPLE.replace("127.0.0.1:9100", f"127.0.0.1:{port}"))
        response = await asyncio.to_thread(_ask, server, file)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    ((head, arguments),) = asked
    assert arguments.keys() == {"city"} and isinstance(arguments["city"], str)
    assert head.startswith("post /weather ") and "authorization: bearer secret" in head
    assert choice["finish_reason"] in ("stop", "length") and not choice["message"].get("tool_calls")
    usage = response.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] / 4, "most of the first prompt"


def _ask(server, file):
    messages = [{"role": "user", "content": "How is the weather in Rome?"}]
    body = {"model": server.model, "messages": messages, "max_tokens": 80, "temperature": 0,
            "tool_choice": "required", "parallel_tool_calls": False}  # fmt: skip
    with gateway(server, "--tools-file", str(file)) as url:
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
