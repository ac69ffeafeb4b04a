"""The real programs: `podstream serve` with the demo model, started once and shared by the tests of this folder."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import openai
import pytest

from tests.collector import collecting

START_TIMEOUT_S = 300
QUICKLY = "--xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false"
"""XLA_FLAGS of servers whose programs nobody shares: they compile in two thirds of the seconds and run no slower."""
SMALL = (
    "--slots",
    "4",
    "--chunk-tokens",
    "64",
    "--embeddings",
    "mean",
    "--max-loras",
    "1",
)  # few shapes, so that a server of its own starts in seconds


@dataclass
class Server:
    port: int
    process: subprocess.Popen
    client: openai.OpenAI
    lines: list[str] = field(default_factory=list)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def model(self):
        return httpx.get(f"{self.url}/v1/models").json()["data"][0]["id"]

    def is_ready(self):
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def wait_until_ready(self, timeout_s=START_TIMEOUT_S):
        end = time.monotonic() + timeout_s
        while not self.is_ready():
            assert self.process.poll() is None, "the server ended:\n" + "\n".join(self.lines)
            assert time.monotonic() < end, f"not ready in {timeout_s} s:\n" + "\n".join(self.lines)
            time.sleep(0.1)

    def pid_of(self, role):
        """Process id of `podstream replica` or `podstream gateway`, found among the children as a person would."""
        children = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        with open(children) as file:  # noqa: PTH123
            for pid in file.read().split():
                with open(f"/proc/{pid}/cmdline") as cmdline:  # noqa: PTH123
                    if f"podstream\0{role}\0" in cmdline.read():
                        return int(pid)
        return None

    def metric(self, name):
        """Sum over the labels of one metric."""
        text = httpx.get(f"{self.url}/metrics").text
        values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        assert values, f"/metrics has no {name}"
        return sum(map(float, values))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def clean_environment():
    """Without what tests/conftest.py set for this process: the programs must work as they come."""
    own = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return {**own, "OTEL_BSP_SCHEDULE_DELAY": "100"}  # spans leave soon


@contextmanager
def serving(path, compile_cache, *flags, port=None, **variables):
    """A running `podstream serve`; ends with SIGINT, as Ctrl-C would, and must then be gone within the drain time.
    `variables` are of its environment; without a path it is the demo model in its home."""
    port = port or free_port()
    command = [sys.executable, "-m", "podstream", "serve", *([] if path is None else [str(path)]), "--port", str(port),
               "--compile-cache", str(compile_cache), *flags]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean_environment() | variables
    )
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="unused", max_retries=0, timeout=120)
    server = Server(port, process, client)
    reader = threading.Thread(target=lambda: server.lines.extend(line.rstrip() for line in process.stdout))
    reader.start()
    try:
        server.wait_until_ready()
        with client:
            yield server
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            process.kill()
            reader.join()
            process.stdout.close()


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory, worker_id):
    """One for all processes of a test run."""
    if worker_id == "master":
        return tmp_path_factory.mktemp("compiled")
    return tmp_path_factory.getbasetemp().parent / "compiled"


@pytest.fixture(scope="session")
def collector():
    """Of the shared server's traces."""
    with collecting() as running:
        yield running


@pytest.fixture(scope="session")
def server(demo_model, compile_cache, collector):
    with serving(demo_model, compile_cache, *SMALL, "--otlp-traces", collector.url) as running:
        yield running
        assert running.metric("podstream:compiles_after_ready_total") == 0, "something was compiled in service"
