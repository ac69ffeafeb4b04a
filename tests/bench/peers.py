"""podstream and its peers side by side, on the same weights and the same requests; tables on stdout.

    python -m tests.bench.peers                                                  everything: an hour on two cores
    python -m tests.bench.peers --rounds 3 --levels 1 8 --peers podstream,vllm --parts levels

Peers are installed once, below podstream's home; llama.cpp is compiled there. Any other server joins with
--cmd 'name=command with {port} {slots} {context} {dtype}'. Servers run one at a time, in turn, so that slow drift of a
shared machine falls on all alike; what others used of the machine stands beside each figure. Each measurement is one
line of the file --out. A file that exists is added to, and the tables are of all that it holds.
"""

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console

from podstream.home import home
from tests.bench import mixed
from tests.bench.machine import probe
from tests.bench.peer_measure import CONTEXT, PREFIX_STREAMS, Record, Wanted, measure
from tests.bench.peer_process import ServerFailed, log_tail, running
from tests.bench.peer_servers import Home, Launch, LlamaCpp, Other, Peer, Podstream, Vllm
from tests.bench.peer_tables import all_tables

PEERS = (Podstream, Vllm, LlamaCpp)
PARTS = {"float32": ("levels", "prefix", "protected", "mixed"), "bfloat16": ("levels", "prefix")}
"""By type of weights, which does not change who waits for whom: that is asked once."""
LEVELS, RATES, PHASE_S = (1, 8, 32, 64), (0.25,), 40.0


@dataclass(frozen=True)
class Visit:
    """One start of a server, and what is measured until its stop."""

    launch: Launch
    wanted: Wanted = field(default_factory=Wanted)


def visits(fits_slots: bool, dtype: str, options: argparse.Namespace) -> Iterator[Visit]:
    """All of one round for one server; one that fits its slots to the streams is started for each number of them."""
    parts = options.parts or PARTS[dtype]
    levels = tuple(options.levels) if "levels" in parts else ()
    streams = sorted({*levels, *([PREFIX_STREAMS] if "prefix" in parts else [])})
    for group in [(count,) for count in streams] if fits_slots else [tuple(streams)]:
        if group:
            prefix = "prefix" in parts and PREFIX_STREAMS in group
            wanted = Wanted(tuple(n for n in group if n in levels), prefix, requests=options.requests)
            yield Visit(Launch(dtype, max(group), CONTEXT), wanted)
    protected_s = options.phase_s if "protected" in parts else 0.0
    rates = tuple(options.rates) if "mixed" in parts else ()
    if protected_s or rates:
        wanted = Wanted(protected_s=protected_s, rates=rates, requests=options.requests)
        yield Visit(Launch(dtype, mixed.SLOTS, mixed.CONTEXT), wanted)


class Notebook:
    """The file that keeps each record as soon as there is one."""

    def __init__(self, path: Path, console: Console) -> None:
        self._path, self._console = path, console
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def write(self, record: Record) -> None:
        line = json.dumps(record)
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)
        with self._path.open("a") as file:
            file.write(line + "\n")

    def read(self) -> list[Record]:
        return [json.loads(line) for line in self._path.read_text().splitlines()]


def run_visit(peer: Peer, visit: Visit, round_index: int, place: Home, notebook: Notebook) -> None:
    """What fails is written down, too, and does not keep others from being measured."""
    launch = visit.launch
    log = place.peers / "logs" / f"{peer.name}-{launch.dtype}-{launch.size}.log"
    peer.command(launch, 0)  # what is installed or written once is no part of a start
    base = {"server": peer.name, "dtype": launch.dtype, "size": launch.size, "round": round_index, **probe()}
    try:
        with running(peer, launch, log) as server:
            for record in measure(server, visit.wanted, peer.batch, round_index):
                notebook.write(base | record)
    except* (ServerFailed, httpx.HTTPError) as group:
        notebook.write(base | {"kind": "failure", "error": repr(_first(group))})
        place.console.print(log_tail(log), markup=False, highlight=False)


def _first(group: BaseExceptionGroup) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/peers.jsonl"), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=1, help="0 only prints the tables of --out")
    parser.add_argument("--peers", default=",".join(peer.name for peer in PEERS), help="default: %(default)s")
    parser.add_argument("--cmd", action="append", default=[], metavar="NAME=COMMAND", help="another server")
    parser.add_argument("--dtypes", nargs="+", default=tuple(PARTS), choices=PARTS)
    parser.add_argument("--parts", nargs="+", choices=PARTS["float32"], help="default: all; of bfloat16 the first two")
    parser.add_argument("--levels", type=int, nargs="+", default=LEVELS, help="numbers of streams")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="requests a second of the mixed load")
    parser.add_argument("--requests", type=int, help="of each measurement; default: by its size")
    parser.add_argument("--phase-s", type=float, default=PHASE_S, help="seconds of each half of the protected part")
    return parser.parse_args(arguments)


def choose(options: argparse.Namespace, place: Home) -> list[Peer]:
    known: dict[str, Peer] = {kind.name: kind(place) for kind in PEERS}
    named = [name for name in options.peers.split(",") if name]
    if unknown := [name for name in named if name not in known]:
        raise SystemExit(f"no such peer: {', '.join(unknown)}; known: {', '.join(known)}, and any other with --cmd")
    return [known[name] for name in named] + [Other(*pair.split("=", 1)) for pair in options.cmd]


def main() -> None:
    options, place = parse(), Home(home(), Console(stderr=True))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # so that the running server is stopped
    notebook, peers = Notebook(options.out, place.console), choose(options, place)
    for dtype in options.dtypes:
        for round_index in range(options.rounds):
            for peer in peers:
                for visit in visits(peer.fits_slots, dtype, options):
                    run_visit(peer, visit, round_index, place, notebook)
    print(all_tables(notebook.read()))


if __name__ == "__main__":
    main()
