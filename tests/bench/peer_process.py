"""One running server: started, asked until it answers with a token, and stopped with all that it started."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from podstream.home import environment
from tests.bench.machine import resident_gib, stop_tree
from tests.bench.peer_servers import Launch, Peer
from tests.bench.serve import free_port

START_TIMEOUT_S = 900
STOP_PATIENCE_S = 30
FIRST_PROMPT = list(range(1_000, 1_016))


class ServerFailed(RuntimeError):
    """It ended before it answered, or took too long."""


@dataclass(frozen=True)
class Running:
    url: str
    model: str
    """What the server calls it."""
    pid: int
    first_token_s: float
    """From the start of its first process to its first token."""

    @property
    def resident_gib(self) -> float:
        return resident_gib(self.pid)


@contextmanager
def running(peer: Peer, launch: Launch, log: Path) -> Iterator[Running]:
    """Its output goes to `log`. Raises ServerFailed."""
    port = free_port()
    command, env = peer.command(launch, port), {**environment(), **peer.environment(launch)}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        started = time.perf_counter()
        # in a session of its own, so that a Ctrl-C here lets us stop it, and what it started, in order
        process = psutil.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            model = _first_token(process, f"http://127.0.0.1:{port}", started, log)
            yield Running(f"http://127.0.0.1:{port}", model, process.pid, round(time.perf_counter() - started, 2))
        finally:
            stop_tree(process, STOP_PATIENCE_S)


def _first_token(process: psutil.Popen, url: str, started: float, log: Path) -> str:
    """The model's name, once it has given a token."""
    with httpx.Client(base_url=url, timeout=START_TIMEOUT_S, trust_env=False) as client:
        while time.perf_counter() - started < START_TIMEOUT_S:
            if process.poll() is not None:
                raise ServerFailed(f"the server ended with {process.returncode} before it answered; see {log}")
            if model := _try(client):
                return model
            time.sleep(0.05)
    raise ServerFailed(f"the server gave no token within {START_TIMEOUT_S} s; see {log}")


def _try(client: httpx.Client) -> str | None:
    try:
        models = client.get("/v1/models")
        if models.status_code != httpx.codes.OK or not models.json()["data"]:
            return None
        model = str(models.json()["data"][0]["id"])
        body = {"model": model, "prompt": FIRST_PROMPT, "max_tokens": 1, "temperature": 0}
        answer = client.post("/v1/completions", json=body)
    except httpx.TransportError:
        return None
    return model if answer.status_code == httpx.codes.OK else None


def log_tail(log: Path, num_bytes: int = 2_000) -> str:
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
        return file.read().decode(errors="replace")
