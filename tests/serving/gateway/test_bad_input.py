"""Whatever is sent, nothing breaks: the right status or a closed connection, and a good request is answered then."""

import asyncio
import json

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig

from serving.gateway import body as body_module
from serving.gateway.protocol import MAX_HEADER_BYTES, GatewayProtocol
from tests.fakes import FAKE_NAME

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GOOD = {"model": FAKE_NAME, "prompt": "abc", "max_tokens": 3}


@pytest.fixture
async def checked(http):
    """A client whose service must still answer when the test is over."""
    yield http
    good = await http.post(COMPLETIONS, json=GOOD)
    assert (good.status_code, good.json()["choices"][0]["text"]) == (200, "abc")


def nested(depth, inner="1"):
    return '{"a":' * depth + inner + "}" * depth


CHAT_START = f'{{"model": "{FAKE_NAME}", "messages": [{{"role": "user", "content": "x"}}], '
BODIES = {
    "deep JSON": nested(5_000),
    "deep schema": CHAT_START + '"guided_json": ' + nested(200).replace('"a"', '"items"') + "}",
    "very deep tools": CHAT_START + '"tools": [{"type": "function", "function": {"name": "f", "parameters": '
    + nested(900) + "}}]}",
    "very deep arguments": CHAT_START.replace("}], ", '}, {"role": "assistant", "tool_calls": [{"id": "1", "function": '
    '{"name": "f", "arguments": ' + json.dumps(nested(900)) + "}}]}]}"),
    "10,000 stops": CHAT_START + '"stop": ' + json.dumps(["x"] * 10_000) + "}",
    "10,000 tools": CHAT_START + '"tools": ' + json.dumps([{"type": "function"}] * 10_000) + "}",
    "a lone surrogate": CHAT_START + '"user": "\\ud800"}',
    "NaN": CHAT_START + '"temperature": NaN}',
    "infinity": CHAT_START + '"temperature": 1e999}',
    "a huge number": CHAT_START + '"max_tokens": ' + "9" * 300 + "}",
    "a negative limit": CHAT_START + '"max_tokens": -1}',
    "no limit": CHAT_START + '"max_tokens": 0}',
    "negative rivals": CHAT_START + '"logprobs": true, "top_logprobs": -1}',
    "an image": f'{{"model": "{FAKE_NAME}", "messages": [{{"role": "user", "content": '
    '[{"type": "image_url", "image_url": {"url": "x"}}]}]}',
    "audio": f'{{"model": "{FAKE_NAME}", "messages": [{{"role": "user", "content": [{{"type": "input_audio"}}]}}]}}',
    "10,000 messages too many": CHAT_START.replace("}], ", "}" + ', {"role": "user", "content": "x"}' * 10_000 + "]}"),
    "a token outside": CHAT_START + '"stop_token_ids": [99999999999]}',
    "binary": "\x00\x01",
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
async def test_a_bad_body_is_a_400(checked, name):
    response = await checked.post(CHAT, content=BODIES[name].encode())
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


PATHS = (CHAT, COMPLETIONS, "/v1/responses", "/v1/chat", "/v1/embeddings", "/tokenize", "/detokenize")
ANYWHERE = ("{", "[]", '"x"', "", '{"a": NaN}', '{"a": "\\ud800"}', nested(5_000), "\x00", '{"no_such_field": 1}')


@pytest.mark.parametrize("path", PATHS)
async def test_every_endpoint_refuses_what_is_no_body(checked, path):
    for body in ANYWHERE:
        response = await checked.post(path, content=body.encode())
        assert response.status_code == 400, (body[:20], response.text)
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}


async def test_a_body_that_dribbles_is_given_up(shared_gateway, monkeypatch):
    monkeypatch.setattr(body_module, "BODY_TIMEOUT_S", 0.1)
    reader, writer = await connected(shared_gateway)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{{".encode())
    assert b" 408 " in await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    assert (await shared_gateway.http.post(COMPLETIONS, json=GOOD)).status_code == 200


@pytest.mark.parametrize("start", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"])
async def test_headers_that_dribble_close_the_connection(shared_gateway, monkeypatch, start):
    monkeypatch.setattr(GatewayProtocol, "headers_timeout_s", 0.1)
    reader, writer = await connected(shared_gateway)
    writer.write(start)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    assert (await shared_gateway.http.post(COMPLETIONS, json=GOOD)).status_code == 200


async def test_headers_without_end_are_refused(shared_gateway):
    reader, writer = await connected(shared_gateway)
    line = b"x: " + b"y" * 1000 + b"\r\n"
    writer.write(b"GET /health HTTP/1.1\r\n" + line * (MAX_HEADER_BYTES // 1000 + 2))
    assert b" 400 " in await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    assert (await shared_gateway.http.post(COMPLETIONS, json=GOOD)).status_code == 200


def connected(gateway):
    return asyncio.open_connection(*gateway.url.removeprefix("http://").split(":"))


@pytest.mark.slow
async def test_no_document_of_the_schema_breaks_the_service(shared_gateway):
    """Bodies that follow /openapi.json, and bodies that almost do, for every path. Schemathesis waits, so it has a
    thread of its own."""
    num_operations = await asyncio.to_thread(fuzz_every_operation, shared_gateway.url)
    assert num_operations >= 14
    good = await shared_gateway.http.post(COMPLETIONS, json=GOOD)
    assert good.json()["choices"][0]["text"] == "abc"


def fuzz_every_operation(url):
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", config=SchemathesisConfig())
    operations = [result.ok() for result in schema.get_all_operations()]
    for operation in operations:

        @hypothesis.given(case=operation.as_strategy())
        @hypothesis.settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        def fuzz(case):
            case.call_and_validate(base_url=url, checks=[not_a_server_error], timeout=5)

        fuzz()
    return len(operations)
