"""Refusing costs a bounded little: of a real gateway's processor time, of everybody else's time, and of its memory."""

import asyncio
import http.client
import json
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

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
        self.baseline = self.peak_bytes = 0
        self.late_s = 0.0
        self._probing = threading.Event()

    @property
    def cpu_s(self):
        times = self.process.cpu_times()
        return times.user + times.system

    def see_memory(self):
        """The most it has had since the first call."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (peak,) = [int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM")]
        self.baseline, self.peak_bytes = self.baseline or peak, peak

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
    def bounded(self, what, cpu_s=CPU_S):
        before = self.cpu_s
        with self.probed():
            yield
        self.see_memory()
        if True:
            print(
                f"{what[:70]:70s} cpu {self.cpu_s - before:.2f} late {self.late_s:.2f} peak +{(self.peak_bytes - self.baseline) >> 20}"
            )
            Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
            return
        assert self.cpu_s - before <= cpu_s, f"{what}: {self.cpu_s - before:.2f} s of processor time"
        assert self.late_s <= LATE_S, f"{what}: health {self.late_s:.2f} s late"
        assert self.peak_bytes - self.baseline <= GROWTH, f"{what}: {(self.peak_bytes - self.baseline) >> 20} MiB more"


@pytest.fixture(scope="module")
async def gateway(shared):
    """Its client works in threads: this loop runs the replica."""
    with listen("127.0.0.1", 0) as listener:
        command = [sys.executable, "-c", GATEWAY, str(listener.fileno()), shared.address]
        process = subprocess.Popen(command, pass_fds=[listener.fileno()])
        running = Gateway(base_url(listener), psutil.Process(process.pid))
        try:
            await asyncio.to_thread(warm_up, running)
            running.see_memory()
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


def most(element, room=MAX_BYTES - MIB):
    """As many as are read at all: the body's fields have to refuse them."""
    return b"[" + b",".join([element] * (room // (ELEMENTS[element] + VALUE_BYTES))) + b"]"


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
            for element in ELEMENTS:
                check(gateway, path, filled(fields, most(element)), f"{fields} of {element}")
            check(gateway, path, filled(fields, keys(MAX_KEYS)), f"{fields} of keys")

    await asyncio.to_thread(run)


def largest(element):
    return b"[" + b",".join([element] * (LARGEST // (len(element) + 1) - 100)) + b"]"


def arguments(text, count):
    call = {"id": "1", "function": {"name": "f", "arguments": text}}
    return body({"messages": [{"role": "assistant", "tool_calls": [call]}] * count})


def forced(schema):
    tool = {"type": "function", "function": {"name": "f", "parameters": HOLE}}
    return filled({"messages": MESSAGES, "tools": [tool], "tool_choice": "required"}, schema)


TEXT = b"x" * (LARGEST - 1000)
CHAT = {"messages": MESSAGES}
SHAPES = {
    **{f"8 MiB of {element.decode()}": filled({"messages": HOLE}, largest(element)) for element in ELEMENTS},
    "many keys": filled(CHAT | {"x": HOLE}, keys(600_000)),
    "equal keys": filled(CHAT | {"x": HOLE}, b"{" + b",".join([b'"a":0'] * MIB) + b"}"),
    "a long key": filled(CHAT | {"x": HOLE}, b'{"%s":1}' % TEXT),
    "a long name of a field": b'{"%s":1}' % TEXT,
    "a long model": b'{"model":"%s","messages":[]}' % TEXT,
    "a long role": filled({"messages": [{"role": HOLE, "content": "x"}]}, b'"%s"' % TEXT),
    "a long kind of part": filled({"messages": [{"role": "user", "content": [{"type": HOLE}]}]}, b'"%s"' % TEXT),
    "a long text": filled({"messages": [{"role": "user", "content": HOLE}]}, b'"%s"' % TEXT),
    "a long text of commas": filled({"messages": [{"role": "user", "content": HOLE}]}, b'"%s"' % (b"[," * (4 * MIB - 500))),
    "escapes": filled({"messages": [{"role": "user", "content": HOLE}]}, b'"%s"' % (b"\\u00e9" * (MIB + MIB // 4))),
    "escaped quotes": filled({"messages": [{"role": "user", "content": HOLE}]}, b'"%s"' % (b'\\"' * (4 * MIB - 500))),
    "backslashes": filled({"messages": [{"role": "user", "content": HOLE}]}, b'"%s' % (b"\\" * (LARGEST - 1000))),
    "quotes": b'"' * (LARGEST - 10),
    "digits": filled(CHAT | {"seed": HOLE}, b"9" * (LARGEST - 1000)),
    "1e400": filled(CHAT | {"temperature": HOLE}, b"1e400"),
    "deep": b"[" * (LARGEST - 10),
    "deep objects": b'{"a":' * (LARGEST // 5 - 10),
    "bad UTF-8": filled({"messages": [{"role": "user", "content": HOLE}]}, b'"%s\xff"' % TEXT),
    "surrogates": filled({"messages": [{"role": "user", "content": HOLE}]}, b'"%s"' % (b"\\ud800" * MIB)),
    "blanks": b" " * (LARGEST - 10),
    "arguments of lists": arguments("[" + "[]," * 100_000 + "[]]", 20),
    "many arguments of lists": arguments('{"a": [' + "[]," * 35 + "[]]}", 25_000),
    "no arguments": arguments("x" * 300, 9_000),
    "a forced schema": forced(b'{"type":"object","properties":{%s}}' % b",".join(b'"%d":{"anyOf":[{},{}]}' % i for i in range(9_000))),
    "a schema in circles": forced(b'{"$ref":"#","anyOf":[{"$ref":"#"},{"$ref":"#"}]}'),
    "a wide schema": forced(b'{"anyOf":%s}' % most(b"{}", 16 * MIB)),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
async def test_a_hostile_shape_costs_little(gateway, name):
    await asyncio.to_thread(check, gateway, "/v1/chat/completions", SHAPES[name], name)
