"""The front ends of podstream and vLLM side by side: `python -m tests.bench.vllm_front`, after `make peers`.

Each serves the same streams in front of an engine that emits one token for everyone per step at the same pace, and what
its server process spends on an event is measured. Detokenizing is within that process for vLLM and before it for
podstream, whose replica does it.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from podstream.home import home
from tests.bench import gateway
from tests.bench.machine import stop_tree
from tests.bench.peer_servers import VLLM

PEERS = home() / "peers"
VENV = PEERS / VLLM.replace("==", "-")
MODEL = PEERS / "models" / "smollm2-bfloat16"
SCRIPT = Path(__file__).with_name("vllm_scripted.py")
CONTEXT = 1024
PATIENCE_S = 240


@contextmanager
def vllm(num_streams: int, step_s: float) -> Iterator[tuple[int, psutil.Process]]:
    port = gateway.free_port()
    command = [
        str(VENV / "bin" / "python"), str(SCRIPT), "--model", str(MODEL), "--served-model-name", "scripted",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(CONTEXT),
        "--max-num-seqs", str(num_streams), "--enforce-eager",
    ]  # fmt: skip
    env = {
        **os.environ, "PYTHONPATH": str(SCRIPT.parent), "STEP_S": str(step_s), "VLLM_CPU_KVCACHE_SPACE": "4",
        "LD_PRELOAD": str(VENV / "lib" / "libiomp5.so"), "VLLM_CACHE_ROOT": str(PEERS / "cache" / "vllm"),
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    }  # fmt: skip
    process = psutil.Popen(command, env=env, cwd=MODEL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        gateway.wait_until(f"http://127.0.0.1:{port}/health", PATIENCE_S)
        yield port, process
    finally:
        stop_tree(process, 10)


def measure(name: str, num_streams: int, events_per_s: int, seconds: float) -> dict[str, object]:
    step_s = num_streams / events_per_s
    tokens = CONTEXT - 100  # no stream may end meanwhile
    assert (seconds + 5) / step_s < tokens, "ask for fewer seconds, fewer events or more streams"
    with vllm(num_streams, step_s) if name == "vllm" else gateway.running_gateway(step_s) as (port, process):
        told = gateway.steady(port, process, num_streams, tokens, seconds)
    return {"server": name, **told}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--events-per-s", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--servers", nargs="+", default=["podstream", "vllm"])
    options = parser.parse_args()
    if not VENV.exists() or not MODEL.exists():
        raise SystemExit(f"vLLM is not in {VENV}: run `make peers` once.")
    for _ in range(options.rounds):
        for name in options.servers:
            print(json.dumps(measure(name, options.streams, options.events_per_s, options.seconds)), flush=True)


if __name__ == "__main__":
    main()
