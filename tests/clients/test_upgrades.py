"""Clients that ask for HTTP/2 by an Upgrade where there is no TLS are answered in the HTTP that is spoken here."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from tests.fakes import FAKE_NAME, sse_events

SCRIPT = Path(__file__).with_name("HttpClientAsks.java")
WHOLE = json.dumps({"model": FAKE_NAME, "prompt": "abc", "max_tokens": 7})
STREAM = json.dumps({"model": FAKE_NAME, "prompt": "abc", "max_tokens": 7, "stream": True})


async def output_of(*command):
    process = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)
    told, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, errors.decode()
    return told.decode()


def text_of(stream):
    return "".join(event["choices"][0]["text"] for event in sse_events(stream.rstrip("\n") + "\n\n")[:-1])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("java") is None, reason="there is no java here")
async def test_the_client_of_java(shared_gateway):
    java = ("java", "-XX:TieredStopAtLevel=1", "-Xshare:auto", str(SCRIPT))
    told = await output_of(*java, shared_gateway.url, WHOLE, STREAM, WHOLE)
    whole, stream, again = told.split("\n===\n")[:3]
    for answer in (whole, again):
        status, _, body = answer.partition("\n")
        assert (status, json.loads(body)["choices"][0]["text"]) == ("200 HTTP_1_1", "abcabca")
    status, _, events = stream.partition("\n")
    assert (status, text_of(events)) == ("200 HTTP_1_1", "abcabca")


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
@pytest.mark.parametrize("version", ["--http2", "--http1.1", "--http1.0"])
@pytest.mark.parametrize("body", [WHOLE, STREAM], ids=["whole", "stream"])
async def test_curl(shared_gateway, version, body):
    url = f"{shared_gateway.url}/v1/completions"
    told = await output_of(
        "curl", "-sS", "--fail", "--noproxy", "*", "--max-time", "20", version, "--json", body, "-w",
        "\n%{http_version} %{response_code}", url,
    )  # fmt: skip
    answer, _, status = told.rpartition("\n")
    assert status == "1.1 200"
    text = text_of(answer) if body is STREAM else json.loads(answer)["choices"][0]["text"]
    assert text == "abcabca"


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
async def test_curl_asks_for_the_headers_alone(shared_gateway):
    told = await output_of(
        "curl", "-sSI", "--noproxy", "*", "--http2", "--max-time", "20", f"{shared_gateway.url}/health"
    )
    assert told.startswith("HTTP/1.1 200 OK\r\n") and "content-length: 15\r\n" in told
