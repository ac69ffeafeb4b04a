"""A tool that the gateway runs, with the real model: a second gateway, with tools, in front of the same replica."""

import asyncio
import json
import re

import httpx
import pytest

from serving.gateway.server_tools.config import ServerTool, ServerTools
from tests.services import running_gateway

pytestmark = pytest.mark.e2e

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
RESULT = "It is 7 degrees and it rains."


@pytest.fixture
def address(server):
    """Of the replica."""
    return re.search(r'podstream:replica_info{address="([^"]+)"}', httpx.get(f"{server.url}/metrics").text)[1]


async def test_its_result_is_read_and_the_prompt_is_not_computed_again(address):
    asked, model = [], "smollm2-135m-instruct"

    async def answer(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(re.search(r"content-length: (\d+)", head)[1])
        asked.append(json.loads(await reader.readexactly(length)))
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(RESULT)}\r\n\r\n{RESULT}".encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as tool:
        url = f"http://127.0.0.1:{tool.sockets[0].getsockname()[1]}/"
        tools = ServerTools(tool=[ServerTool(name="weather", url=url, parameters=CITY)])
        async with running_gateway(address, tools=tools) as gateway:
            body = {"model": model, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
            messages = [{"role": "user", "content": "How is the weather in Rome?"}]
            response = await gateway.http.post(
                "/v1/chat/completions", json={**body, "messages": messages, "max_tokens": 80}, timeout=60
            )
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert asked == [{"city": asked[0]["city"]}] and asked[0]["city"] in ("Oslo", "Rome")
    assert choice["finish_reason"] in ("stop", "length") and not choice["message"].get("tool_calls")
    usage = response.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] / 4, "most of the first prompt"
