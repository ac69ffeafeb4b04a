"""What the gateway costs: `make bench-gateway`, a table and one JSON line.

The real `podstream gateway`, in front of a replica that emits scripted tokens over the real gRPC. Events per CPU-second
are of the gateway's process alone, at a pace at which nothing is merged; added ttft is all from a client's request to
its first token, since the replica answers at once.
"""

import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import httpx
import psutil

EVENTS_PER_S = 12_000
"""What is asked of the gateway: well below what it can do, so that each token is one event."""
SECONDS = 6.0
STREAMS = (1, 100, 1000)
MAX_STEPS_PER_S = 1000
IDLE = 5000
ARRIVALS_PER_S = 200
PATIENCE_S = 30
Run = Callable[[float], AbstractContextManager[tuple[int, psutil.Process]]]


@contextmanager
def running(*command: str) -> Iterator[psutil.Popen]:
    process = psutil.Popen([sys.executable, "-m", *command])
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def running_gateway(step_s: float) -> Iterator[tuple[int, psutil.Process]]:
    """Its port and process, in front of a replica with such steps."""
    port = free_port()
    with (
        tempfile.TemporaryDirectory(prefix="pod-") as folder,
        running("tests.bench.scripted_replica", "--address", f"unix:{folder}/r.sock", "--step-s", str(step_s)),
        running("podstream", "gateway", "--replica", f"unix:{folder}/r.sock", "--port", str(port),
                "--max-queued", "100000", "--drain-s", "0") as process,
    ):  # fmt: skip
        wait_until(f"http://127.0.0.1:{port}/ready", PATIENCE_S)
        yield port, process


@contextmanager
def running_floor(step_s: float, *options: str) -> Iterator[tuple[int, psutil.Process]]:
    """The same for a server that writes constant bytes, with no gateway around it and no replica behind it."""
    port = free_port()
    with running("tests.bench.sse_floor", "--port", str(port), "--step-s", str(step_s), *options) as process:
        wait_until(f"http://127.0.0.1:{port}/ready", PATIENCE_S)
        yield port, process


def load(port: int, *arguments: str) -> dict[str, float]:
    told = subprocess.run(_load_command(port, *arguments), capture_output=True, check=True, timeout=120).stdout
    return json.loads(told)


def events_per_cpu_s(num_streams: int, run: Run) -> dict[str, float]:
    """All streams are under way: what it costs to begin one is the other part's business."""
    steps_per_s = min(EVENTS_PER_S / num_streams, MAX_STEPS_PER_S)
    with run(1 / steps_per_s) as (port, process):
        return steady(port, process, num_streams, 90_000, SECONDS)


def steady(port: int, process: psutil.Process, num_streams: int, tokens: int, seconds: float) -> dict[str, float]:
    """What the process spends on an event of so many streams, of which none has more than `tokens`."""
    command = _load_command(port, "streams", "--count", str(num_streams), "--tokens", str(tokens),
                            "--seconds", str(seconds))  # fmt: skip
    clients = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
    assert clients.stdin is not None and clients.stdout is not None
    clients.stdout.readline()
    time.sleep(1)
    before = process.cpu_times()
    print("go", file=clients.stdin, flush=True)
    told = json.loads(clients.stdout.readline())
    after = process.cpu_times()
    clients.wait()
    user_s, system_s = after.user - before.user, after.system - before.system
    return {
        "streams": num_streams,
        "events_per_cpu_s": round(told["events"] / (user_s + system_s)),
        "user_us_per_event": round(1e6 * user_s / told["events"], 1),
        "system_us_per_event": round(1e6 * system_s / told["events"], 1),
        "events_per_s": round(told["events"] / told["wall_s"]),
    }


def added_ttft() -> dict[str, float]:
    with running_gateway(0.01) as (port, process):
        load(port, "arrivals", "--per-s", "50", "--seconds", "1")
        before = _cpu_s(process)
        told = load(port, "arrivals", "--per-s", str(ARRIVALS_PER_S), "--seconds", "10")
        cpu_s = _cpu_s(process) - before
    rounded = {name: round(value, 2) for name, value in told.items()}
    return {**rounded, "cpu_ms_per_request": round(1000 * cpu_s / told["requests"], 2)}


def floor_ttft() -> dict[str, float]:
    """What connecting, and the clients themselves, take of it."""
    with running_floor(1.0, "--once") as (port, _):
        told = load(port, "arrivals", "--per-s", str(ARRIVALS_PER_S), "--seconds", "5")
    return {name: round(value, 2) for name, value in told.items()}


def idle_memory() -> dict[str, float]:
    """Private memory that open streams add, and how long the gateway takes for /metrics beside them."""
    with running_gateway(1.0) as (port, process):
        load(port, "arrivals", "--per-s", "50", "--seconds", "1")
        before = process.memory_full_info().uss
        holder = subprocess.Popen(_load_command(port, "idle", "--count", str(IDLE)), stdin=-1, stdout=-1, text=True)
        assert holder.stdin is not None and holder.stdout is not None
        num_open = json.loads(holder.stdout.readline())["open"]
        added = process.memory_full_info().uss - before
        metrics_ms = _metrics_ms(port)
        cpu_before = _cpu_s(process)
        time.sleep(2)
        idle_cores = (_cpu_s(process) - cpu_before) / 2
        told, _ = holder.communicate()
    return {
        "open": num_open,
        "still_open": json.loads(told)["still_open"],
        "kb_per_stream": round(added / num_open / 1000, 1),
        "metrics_ms": round(metrics_ms, 1),
        "idle_cores": round(idle_cores, 3),
    }


def main() -> None:
    measured = {"gateway": [events_per_cpu_s(count, running_gateway) for count in STREAMS]}
    measured["floor"] = [events_per_cpu_s(STREAMS[-1], running_floor)]
    print(
        "| | streams | SSE events per CPU-second | user / system us per event | events/s then |\n|---|---|---|---|---|"
    )
    for name, rows in measured.items():
        for row in rows:
            spent = f"{row['user_us_per_event']} / {row['system_us_per_event']}"
            print(f"| {name} | {row['streams']:,} | {row['events_per_cpu_s']:,} | {spent} | {row['events_per_s']:,} |")
    ttft, least, idle = added_ttft(), floor_ttft(), idle_memory()
    print(f"\nadded ttft at {ARRIVALS_PER_S} requests/s: p50 {ttft['p50_ms']} ms, p95 {ttft['p95_ms']} ms, "
          f"p99 {ttft['p99_ms']} ms, {ttft['cpu_ms_per_request']} CPU ms a request")  # fmt: skip
    print(f"a server that answers at once: p50 {least['p50_ms']} ms, p95 {least['p95_ms']} ms")
    print(f"{idle['open']:,} idle streams: {idle['kb_per_stream']} kB each, {idle['idle_cores']} cores, "
          f"/metrics in {idle['metrics_ms']} ms")  # fmt: skip
    print(json.dumps({**measured, "ttft": ttft, "floor_ttft": least, "idle": idle}))


def _metrics_ms(port: int) -> float:
    """The median of some, on a connection that is open."""
    took = []
    with httpx.Client(trust_env=False) as client:
        for _ in range(21):
            started = time.perf_counter()
            assert client.get(f"http://127.0.0.1:{port}/metrics").status_code == 200
            took.append(1000 * (time.perf_counter() - started))
    return statistics.median(took)


def _load_command(port: int, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.bench.sse_load", "--port", str(port), *arguments]


def _cpu_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(url: str, patience_s: float) -> None:
    """Until it says 200."""
    end = time.monotonic() + patience_s
    while True:
        try:
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < end, f"{url} does not become ready"
        time.sleep(0.05)


if __name__ == "__main__":
    main()
