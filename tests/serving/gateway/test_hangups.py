"""Clients that go away at any moment are no news for the log: no traceback, and nothing is left of them."""

import asyncio
import json
import socket
import struct

import pytest

from tests.fakes import FAKE_NAME, FakeEngineLoop
from tests.services import running_gateway, running_replica, until

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/v1/chat")
RESET = struct.pack("ii", 1, 0)
UPGRADE = (
    b"GET /v1/chat HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)


def post(path, body, header="content-length: 1000"):
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n{header}\r\n\r\n"
    return head.encode() + body


def whole(path, **fields):
    body = json.dumps({"model": FAKE_NAME, "max_tokens": 400, **fields}).encode()
    return post(path, body, f"content-length: {len(body)}")


def message():
    """One frame of a WebSocket's client, whose mask changes nothing."""
    body = json.dumps({"model": FAKE_NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 400}).encode()
    return bytes([0x81, 0x80 | len(body)]) + bytes(4) + body


def farewells():
    """All that a client sends before it is gone."""
    for path in PATHS:
        yield post(path, b'{"a":')
        yield post(path, b'5\r\n{"a":\r\n', "transfer-encoding: chunked")
        yield post(path, b"zz\r\n", "transfer-encoding: chunked")
    for stream in (True, False):
        yield whole("/v1/completions", prompt="abc", stream=stream)
        yield whole("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], stream=stream)
        yield whole("/v1/responses", input="abc", stream=stream)
    yield from (UPGRADE, UPGRADE + message(), UPGRADE + b"\x81\xfe", UPGRADE + b"\xff" * 50)
    yield b"\x16\x03\x01 not HTTP\r\n\r\n"


async def leave(port, data, *, reset, after_s):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    if reset:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.write(data)
    await writer.drain()
    await asyncio.sleep(after_s)
    writer.transport.abort() if reset else writer.close()
    del reader


@pytest.mark.parametrize("reset", [False, True])
async def test_who_hangs_up_leaves_no_traceback(caplog, reset):
    engine = FakeEngineLoop(step_delay_s=0.002)
    async with running_replica(engine) as replica, running_gateway(replica.address) as gateway:
        port = gateway.http.base_url.port
        for after_s in (0.0, 0.1):
            await asyncio.gather(*(leave(port, data, reset=reset, after_s=after_s) for data in farewells()))
        await until(lambda: gateway.admission.num_in_flight == 0 and gateway.client.num_in_flight == 0)
        await until(lambda: replica.service._num_requests() == 0)
        assert (await gateway.http.get("/ready")).status_code == 200
    assert not [record for record in caplog.records if record.exc_info or "Traceback" in record.message]
