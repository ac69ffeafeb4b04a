"""`make bench-serve`: the real programs with the demo model, as one JSON line on stdout; progress goes to stderr.

Absolute figures of a shared machine drift: compare runs that lie side by side, as ratios.
"""

import argparse
import asyncio
import json
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import httpx
from rich.console import Console

from podstream.home import environment, home
from podstream.importing import ensure_demo_model
from tests.bench.host import host_microseconds_per_step
from tests.bench.load import Ask, random_prompt, run_level

PROMPT, OUTPUT = 128, 128
REQUESTS = {1: 3, 8: 24, 32: 64}
START_TIMEOUT_S = 600
console = Console(stderr=True)


class Server:
    """One `podstream serve`, ready when entered; `start_s` says how long that took."""

    def __init__(self, checkpoint: Path, compile_cache: str, extra: list[str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        flags = ["--port", str(self.port), "--compile-cache", compile_cache, *extra]
        self._command = [sys.executable, "-m", "podstream", "serve", str(checkpoint), *flags]

    def __enter__(self) -> "Server":
        started = time.perf_counter()
        self._process = subprocess.Popen(self._command, stdout=sys.stderr, env=dict(environment()))
        while not self._is_ready():
            if self._process.poll() is not None or time.perf_counter() - started > START_TIMEOUT_S:
                raise SystemExit("the server did not become ready; its output above says why")
            time.sleep(0.05)
        self.start_s = round(time.perf_counter() - started, 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=sorted(REQUESTS), choices=[1, 8, 32, 64])
    parser.add_argument("serve_flags", nargs="*", help="more flags for podstream serve, after --")
    options = parser.parse_args()
    checkpoint = ensure_demo_model(home(), console)
    with tempfile.TemporaryDirectory() as cache:
        with Server(checkpoint, cache, options.serve_flags) as cold:
            console.print(f"cold start {cold.start_s} s")
        with Server(checkpoint, cache, options.serve_flags) as warm:
            console.print(f"warm start {warm.start_s} s")
            levels = [_measure(warm, streams) for streams in options.streams]
            metrics = httpx.get(f"{warm.url}/metrics").text
    print(json.dumps(_report(cold, warm, levels, metrics)))


def _measure(server: Server, streams: int) -> dict[str, float | None]:
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    rng = random.Random(streams)
    asks = [Ask(random_prompt(rng, PROMPT), OUTPUT) for _ in range(REQUESTS.get(streams, 2 * streams))]
    level = asyncio.run(run_level(server.url, model, streams, asks)).summary()
    console.print(level)
    return level


def _report(cold: Server, warm: Server, levels: list[dict[str, float | None]], metrics: str) -> dict[str, object]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    compiles = next(line.split()[-1] for line in metrics.splitlines() if line.startswith("podstream:compiles_after"))
    return {
        "prompt_tokens": PROMPT,
        "output_tokens": OUTPUT,
        "levels": levels,
        "start_cold_s": cold.start_s,
        "start_warm_s": warm.start_s,
        "compiles_after_ready": float(compiles),
        "host_us_per_step": {str(n): host_microseconds_per_step(n) for n in (8, 64, 256, 1_024)},
        "device": f"{platform.machine()} CPU",
        "versions": {name: version(name) for name in ("podstream", "jax", "jaxlib", "flax", "orbax-checkpoint")},
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
