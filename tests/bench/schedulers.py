"""The host's part of a decode step, beside vLLM's scheduler alone, in turn; a table.

    python -m tests.bench.schedulers                    running sequences: 8, 64, 256 and 1,024; three rounds
    python -m tests.bench.schedulers --rounds 1 256

vLLM's figure is the scheduler's (`tests.bench.vllm_scheduler`), without its model runner's preparations; ours has the
batch in it, packed and dispatched. vLLM is installed once, as for `tests.bench.peers`.
"""

import argparse
import json
import subprocess
from pathlib import Path
from statistics import median

from rich.console import Console

from podstream.home import environment, home
from tests.bench.host import host_microseconds_per_step
from tests.bench.peer_servers import Home, Launch, Vllm

SCRIPT = Path(__file__).with_name("vllm_scheduler.py")


def vllm_microseconds(place: Home, counts: list[int]) -> dict[int, float]:
    launch = Launch("float32", max(counts), 1)
    peer = Vllm(place)
    python = peer.command(launch, 0)[0]
    argv = [python, str(SCRIPT), str(place.hf_folder("float32")), *map(str, counts)]
    env = {**environment(), **peer.environment(launch)}
    printed = subprocess.run(argv, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {int(count): found for count, found in json.loads(printed.splitlines()[-1]).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("counts", type=int, nargs="*", default=[8, 64, 256, 1_024])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    place = Home(home(), Console(stderr=True))
    ours: dict[int, list[float]] = {count: [] for count in options.counts}
    theirs: dict[int, list[float]] = {count: [] for count in options.counts}
    for _ in range(options.rounds):
        for count in options.counts:
            ours[count].append(host_microseconds_per_step(count))
        for count, found in vllm_microseconds(place, options.counts).items():
            theirs[count].append(found)
    print("| running sequences | podstream us | vllm 0.32, scheduler alone us | vllm / podstream |")
    print("|---|---|---|---|")
    for count in options.counts:
        mine, other = median(ours[count]), median(theirs[count])
        print(f"| {count:,} | {mine:,.0f} | {other:,.0f} | {other / mine:.2f} |")


if __name__ == "__main__":
    main()
