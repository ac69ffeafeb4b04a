"""Refusing costs a bounded little: of a real gateway's processor time, of everybody else's time, and of its memory."""

import asyncio
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from websockets.sync.client import connect

from serving.gateway.body_budget import RETRY_AFTER_S
from serving.gateway.bounded_json import CONTAINER_BYTES, MAX_BYTES, MAX_KEYS, TEXT_BYTES, VALUE_BYTES
from serving.gateway.listener import base_url, listen
from tests.fakes import FAKE_NAME

MIB = 1 << 20
LARGEST = 8 * MIB
CPU_S = LATE_S = 0.5
GROWTH = 50 * MIB
GATEWAY = """
import sys
from serving.config import GatewayConfig
from serving.gateway.listener import inherit
from serving.gateway.main import run
run(GatewayConfig(replica=sys.argv[2]), inherit(int(sys.argv[1])))
"""


class Gateway:
    """A process of its own, and how it fares."""

    def __init__(self, url: str, process: psutil.Process) -> None:
        self.host, self.port = urlsplit(url).hostname, urlsplit(url).port
        self.process = process
        self.baseline = 0
        self.late_s = 0.0

    @property
    def cpu_s(self):
        times = self.process.cpu_times()
        return times.user + times.system

    def memory(self, name):
        """In bytes: VmRSS what it has, VmHWM the most it has had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        (kilobytes,) = [line.split()[1] for line in status if line.startswith(name)]
        return int(kilobytes) << 10

    def post(self, path, *parts):
        with closing(http.client.HTTPConnection(self.host, self.port, timeout=20)) as connection:
            connection.putrequest("POST", path)
            connection.putheader("content-type", "application/json")
            connection.putheader("content-length", str(sum(map(len, parts))))
            connection.endheaders()
            for part in parts:
                connection.send(part)
            response = connection.getresponse()
            return response.status, response.read(), dict(response.getheaders())

    def health(self):
        started = time.monotonic()
        with closing(http.client.HTTPConnection(self.host, self.port, timeout=60)) as connection:
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
        return time.monotonic() - started

    @contextmanager
    def probed(self):
        """Asks for its health all the while: `late_s` is the longest that this has taken."""
        stop, self.late_s = threading.Event(), 0.0

        def probe():
            while not stop.wait(0.02):
                self.late_s = max(self.late_s, self.health())

        thread = threading.Thread(target=probe)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    @contextmanager
    def bounded(self, what, cpu_s=CPU_S, late_s=LATE_S):
        """What happens meanwhile costs no more than the limits say."""
        before_s, before_bytes = self.cpu_s, self.memory("VmRSS")
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")  # the peak begins anew
        with self.probed():
            yield
        spent_s, growth = self.cpu_s - before_s, self.memory("VmHWM") - before_bytes
        assert spent_s <= cpu_s, f"{what}: {spent_s:.2f} s of processor time"
        assert self.late_s <= late_s, f"{what}: health {self.late_s:.2f} s late"
        assert growth <= GROWTH, f"{what}: {growth >> 20} MiB more at its peak"
        kept = self.memory("VmRSS") - self.baseline
        assert kept <= 2 * GROWTH, f"{what}: all of them together have left {kept >> 20} MiB"


@pytest.fixture(scope="module")
async def gateway(shared):
    """Its client works in threads: this loop runs the replica."""
    with listen("127.0.0.1", 0) as listener:
        command = [sys.executable, "-c", GATEWAY, str(listener.fileno()), shared.address]
        process = subprocess.Popen(  # noqa: ASYNC220 - it only starts here
            command, pass_fds=[listener.fileno()]
        )
        running = Gateway(base_url(listener), psutil.Process(process.pid))
        try:
            await asyncio.to_thread(warm_up, running)
            running.baseline = running.memory("VmRSS")
            yield running
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait, 10)


def warm_up(gateway):
    deadline = time.monotonic() + 30
    while gateway.post("/v1/completions", body({"prompt": "abc", "max_tokens": 3}))[0] != 200:
        assert time.monotonic() < deadline, "the gateway did not find its replica"
        time.sleep(0.05)


def body(fields):
    return json.dumps({"model": FAKE_NAME, **fields}).encode()


HOLE = "@@"
ELEMENTS = {b"{}": CONTAINER_BYTES, b"[]": CONTAINER_BYTES, b'""': TEXT_BYTES, b"0": 0, b"null": 0}


def many(element, count):
    return b"[" + (element + b",") * (count - 1) + element + b"]"


def most(element, room=MAX_BYTES - MIB):
    """As many as are read at all: the body's fields have to refuse them."""
    return many(element, room // (ELEMENTS[element] + VALUE_BYTES))


def largest(element):
    return many(element, LARGEST // (len(element) + 1) - 100)


def keys(count, value=b"0"):
    return b"{" + b",".join(b'"%d":%s' % (key, value) for key in range(count)) + b"}"


USER = {"role": "user", "content": "x"}
MESSAGES = [USER]
FIELDS = {
    "/v1/chat/completions": [
        {"messages": HOLE}, {"messages": [HOLE]}, {"messages": [{"role": "user", "content": HOLE}]},
        {"messages": [{"role": "assistant", "tool_calls": HOLE}]},
        {"messages": [{"role": "user", "content": [{"type": HOLE}]}]},
        *({"messages": MESSAGES, name: HOLE} for name in (
            "tools", "tool_choice", "stop", "stop_token_ids", "banned_token_ids", "logit_bias", "guided_choice",
            "guided_json", "response_format", "metadata", "server_tools", "functions", "no_such_field")),
    ],
    "/v1/completions": [{"prompt": HOLE}, {"prompt": [HOLE]}, {"prompt": "x", "stop": HOLE}],
    "/v1/responses": [
        {"input": HOLE}, {"input": [HOLE]}, {"input": [{"role": "user", "content": HOLE}]},
        {"input": [{"type": HOLE}]}, {"input": [{"type": "reasoning", "summary": HOLE, "bad": 1}]},
        *({"input": "x", name: HOLE} for name in ("tools", "include", "server_tools", "text", "metadata")),
    ],
    "/v1/chat": [{"messages": HOLE}, {"messages": MESSAGES, "tools": HOLE}],
    "/v1/embeddings": [{"input": HOLE}, {"input": [HOLE]}],
    "/tokenize": [{"messages": HOLE}, {"messages": MESSAGES, "tools": HOLE}, {"prompt": HOLE}],
    "/detokenize": [{"tokens": HOLE}],
    "/v1/load_lora_adapter": [{"lora_name": "a", "lora_path": HOLE}],
    "/v1/unload_lora_adapter": [{"lora_name": HOLE}],
}  # fmt: skip


def filled(fields, hole):
    return body(fields).replace(f'"{HOLE}"'.encode(), hole)


def check(gateway, path, hostile, what):
    with gateway.bounded(what):
        status, answer, _ = gateway.post(path, hostile)
    assert 200 <= status < 500, (what, status, answer[:300])
    assert len(answer) < 10_000 or status == 200, what


@pytest.mark.parametrize("path", FIELDS)
async def test_a_million_elements_of_a_field_cost_little(gateway, path):
    def run():
        for fields in FIELDS[path]:
            for element in (b"{}", b'""', b"0"):
                check(gateway, path, filled(fields, most(element)), f"{fields} of {element}")
            check(gateway, path, filled(fields, keys(MAX_KEYS)), f"{fields} of keys")

    await asyncio.to_thread(run)


def arguments(text, count):
    call = {"id": "1", "function": {"name": "f", "arguments": text}}
    return body({"messages": [{"role": "assistant", "tool_calls": [call]}] * count})


def forced(schema):
    tool = {"type": "function", "function": {"name": "f", "parameters": HOLE}}
    return filled({"messages": MESSAGES, "tools": [tool], "tool_choice": "required"}, schema)


TEXT = b"x" * (LARGEST - 1000)
CHAT = {"messages": MESSAGES}
CONTENT = {"messages": [{"role": "user", "content": HOLE}]}
MANY_PROPERTIES = b",".join(b'"%d":{"anyOf":[{},{}]}' % i for i in range(9_000))


SHAPES = {
    **{f"8 MiB of {element.decode()}": filled({"messages": HOLE}, largest(element)) for element in ELEMENTS},
    "many keys": filled(CHAT | {"x": HOLE}, keys(600_000)),
    "equal keys": filled(CHAT | {"x": HOLE}, b"{" + b",".join([b'"a":0'] * MIB) + b"}"),
    "a long key": filled(CHAT | {"x": HOLE}, b'{"%s":1}' % TEXT),
    "a long name of a field": b'{"%s":1}' % TEXT,
    "a long model": b'{"model":"%s","messages":[]}' % TEXT,
    "a long role": filled({"messages": [{"role": HOLE, "content": "x"}]}, b'"%s"' % TEXT),
    "a long kind of part": filled({"messages": [{"role": "user", "content": [{"type": HOLE}]}]}, b'"%s"' % TEXT),
    "a long text": filled(CONTENT, b'"%s"' % TEXT),
    "a long text of commas": filled(CONTENT, b'"%s"' % (b"[," * (4 * MIB - 500))),
    "escapes": filled(CONTENT, b'"%s"' % (b"\\u00e9" * (MIB + MIB // 4))),
    "escaped quotes": filled(CONTENT, b'"%s"' % (b'\\"' * (4 * MIB - 500))),
    "backslashes": filled(CONTENT, b'"%s' % (b"\\" * (LARGEST - 1000))),
    "quotes": b'"' * (LARGEST - 10),
    "digits": filled(CHAT | {"seed": HOLE}, b"9" * (LARGEST - 1000)),
    "1e400": filled(CHAT | {"temperature": HOLE}, b"1e400"),
    "deep": b"[" * (LARGEST - 10),
    "deep objects": b'{"a":' * (LARGEST // 5 - 10),
    "bad UTF-8": filled(CONTENT, b'"%s\xff"' % TEXT),
    "surrogates": filled(CONTENT, b'"%s"' % (b"\\ud800" * MIB)),
    "blanks": b" " * (LARGEST - 10),
    "arguments of lists": arguments("[" + "[]," * 100_000 + "[]]", 20),
    "many arguments of lists": arguments('{"a": [' + "[]," * 35 + "[]]}", 25_000),
    "no arguments": arguments("x" * 300, 9_000),
    "a forced schema": forced(b'{"type":"object","properties":{%s}}' % MANY_PROPERTIES),
    "a schema in circles": forced(b'{"$ref":"#","anyOf":[{"$ref":"#"},{"$ref":"#"}]}'),
    "a wide schema": forced(b'{"anyOf":%s}' % most(b"{}", 16 * MIB)),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
async def test_a_hostile_shape_costs_little(gateway, name):
    await asyncio.to_thread(check, gateway, "/v1/chat/completions", SHAPES[name], name)


@pytest.mark.parametrize("path", FIELDS)
async def test_eight_megabytes_cost_little_everywhere(gateway, path):
    def run():
        for element in (b"{}", b'""'):
            check(gateway, path, filled({"no_such_field": HOLE}, largest(element)), f"{path}: {element}")

    await asyncio.to_thread(run)


def unfinished(gateway, path, num_bytes):
    """A connection with a body that lacks its last byte."""
    connection = socket.create_connection((gateway.host, gateway.port), timeout=20)
    connection.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {num_bytes}\r\n\r\n".encode())
    connection.sendall(b" " * (num_bytes - 1))
    return connection


async def test_bodies_that_never_end_share_one_budget_and_leave_room_for_others(gateway):
    def run():
        with gateway.bounded("60 bodies without end", cpu_s=3):
            connections = [unfinished(gateway, "/v1/chat/completions", LARGEST) for _ in range(60)]
            refused = [answer for answer in map(answered, connections) if answer]
            status, _, _ = gateway.post("/v1/completions", body({"prompt": "abc", "max_tokens": 3}))
        for connection in connections:
            connection.close()
        assert len(refused) >= 55
        assert all(b" 503 " in answer and b"retry-after: %d" % RETRY_AFTER_S in answer for answer in refused)
        assert status == 200

    await asyncio.to_thread(run)
    await asyncio.to_thread(large_ones_are_welcome_again, gateway)


def answered(connection):
    connection.settimeout(0.2)
    try:
        return connection.recv(4096)
    except TimeoutError:
        return b""


def large_ones_are_welcome_again(gateway):
    deadline = time.monotonic() + 5
    while gateway.post("/v1/chat/completions", SHAPES["blanks"])[0] == 503:
        assert time.monotonic() < deadline, "the budget was not given back"
        time.sleep(0.05)


async def test_many_at_once_keep_nobody_waiting(gateway):
    """One after another, with others in between: it takes seconds of work for all of them."""
    hostile = filled({"messages": HOLE}, most(b"0"))

    def run():
        with gateway.bounded("20 at once", 20 * CPU_S, 2 * LATE_S), ThreadPoolExecutor(20) as threads:
            answers = list(threads.map(lambda _: gateway.post("/v1/chat/completions", hostile), range(20)))
        assert {status for status, _, _ in answers} <= {400, 503}

    await asyncio.to_thread(run)


@pytest.mark.parametrize("size", [1, 100])
async def test_a_body_in_tiny_chunks_costs_little(gateway, size):
    def run():
        chunk = b"%x\r\n%s\r\n" % (size, b" " * size)
        start = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        with gateway.bounded(f"chunks of {size}"):
            connection = socket.create_connection((gateway.host, gateway.port), timeout=20)
            with connection, contextlib.suppress(ConnectionError):
                connection.sendall(start + chunk * (LARGEST // size) + b"0\r\n\r\n")
                assert b" 400 " in connection.recv(4096)

    await asyncio.to_thread(run)


def opened(gateway):
    return connect(f"ws://{gateway.host}:{gateway.port}/v1/chat/ws", compression=None, proxy=None)


def turn(messages):
    return f'{{"type": "chat", "messages": {messages.decode()}}}'


SOCKET_MESSAGES = {
    "8 MiB of {}": turn(largest(b"{}")),
    "numbers": turn(most(b"0")),
    "a long type": f'{{"type": "{TEXT.decode()}"}}',
    "deep": "[" * (LARGEST - 10),
}  # fmt: skip


@pytest.mark.parametrize("name", SOCKET_MESSAGES)
async def test_a_hostile_message_on_a_socket_costs_little(gateway, name):
    def run():
        with opened(gateway) as ws:
            with gateway.bounded(f"socket: {name}"):
                ws.send(SOCKET_MESSAGES[name])
                answer = json.loads(ws.recv(10))
            assert answer["type"] == "error"
            assert len(answer["error"]["message"]) < 3000

    await asyncio.to_thread(run)


async def test_thousands_of_messages_on_a_socket_keep_nobody_waiting(gateway):
    def run():
        with opened(gateway) as ws, gateway.probed():
            for _ in range(3000):
                ws.send("{}")
            for _ in range(3000):
                ws.recv(10)
        assert gateway.late_s <= LATE_S

    await asyncio.to_thread(run)


async def test_messages_without_end_share_the_budget_of_bodies(gateway):
    def run():
        with gateway.bounded("20 messages without end", cpu_s=3):
            sockets = [unfinished_message(gateway) for _ in range(20)]
            codes = [code for code in map(closed_with, sockets) if code]
        for each in sockets:
            each.close()
        assert len(codes) >= 15
        assert set(codes) == {1013}

    await asyncio.to_thread(run)
    await asyncio.to_thread(large_ones_are_welcome_again, gateway)


def unfinished_message(gateway):
    """By hand: a frame of text that lacks its last byte."""
    connection = socket.create_connection((gateway.host, gateway.port), timeout=20)
    connection.sendall(
        b"GET /v1/chat/ws HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    while b"\r\n\r\n" not in connection.recv(4096):
        pass
    with contextlib.suppress(ConnectionError):
        connection.sendall(b"\x81\xff" + (LARGEST - 10).to_bytes(8, "big") + bytes(4) + b" " * (LARGEST - 11))
    return connection


def closed_with(connection):
    """The code of its close frame; 0 while it is open."""
    try:
        frame = answered(connection)
    except ConnectionError:
        return 1013  # the frame was lost with the connection
    return int.from_bytes(frame[2:4], "big") if frame else 0


async def test_headers_and_queries_without_end_are_refused(gateway):
    def run():
        for start in (b"GET /health?" + b"a=b&" * MIB, b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * MIB):
            connection = socket.create_connection((gateway.host, gateway.port), timeout=20)
            with gateway.bounded("headers"), connection, contextlib.suppress(ConnectionError):
                connection.sendall(start)
                assert b" 400 " in connection.recv(4096)

    await asyncio.to_thread(run)
