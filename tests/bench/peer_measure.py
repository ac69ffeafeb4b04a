"""What is measured on one running server, as records. Seeds make all prompts, so every server gets the same."""

import asyncio
import random
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench import mixed
from tests.bench.load import Ask, random_prompt, run_level
from tests.bench.machine import watch_cores
from tests.bench.peer_process import Running

PROMPT, OUTPUT, CONTEXT = 128, 128, 640
PREFIX, PREFIX_REST, PREFIX_OUTPUT, PREFIX_STREAMS, PREFIX_REQUESTS = 512, 32, 32, 8, 32
REQUESTS, MIXED_REQUESTS = {1: 3, 8: 24, 32: 64, 64: 128}, 40
WARM_UP_OUTPUT = 8

Record = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """What to measure between one start of a server and its stop."""

    levels: tuple[int, ...] = ()
    """Numbers of streams."""
    prefix: bool = False
    protected_s: float = 0.0
    """Seconds of each half; 0 leaves it out."""
    rates: tuple[float, ...] = ()
    """Of the mixed load, in requests a second."""
    requests: int | None = None
    """Of each measurement; None: by its size."""

    @property
    def streams(self) -> set[int]:
        """How many requests run at once in some measurement: what is warmed up."""
        traffic = (mixed.INTERACTIVE, mixed.SLOTS) if self.protected_s or self.rates else ()
        return {*self.levels, *traffic, *((PREFIX_STREAMS,) if self.prefix else ())}


def measure(server: Running, wanted: Wanted, batch: Mapping[str, object], round_index: int) -> Iterator[Record]:
    """`batch` are the fields of a request that may wait."""
    seed = f"round {round_index}"
    yield {"kind": "start", "first_token_s": server.first_token_s}
    for streams in sorted(wanted.streams):
        _closed_loop(server, f"{seed} warm-up", streams, streams, PROMPT, WARM_UP_OUTPUT)
    for streams in wanted.levels:
        requests = wanted.requests or REQUESTS.get(streams, 2 * streams)
        yield {"kind": "level", **_closed_loop(server, seed, streams, requests, PROMPT, OUTPUT)}
    if wanted.prefix:
        yield {"kind": "prefix", **_shared_prefix(server, seed, wanted.requests or PREFIX_REQUESTS)}
    if wanted.protected_s:
        work = mixed.interactive_protected(server.url, server.model, batch, seed, wanted.protected_s)
        yield {"kind": "protected", **_watched(server, work)}
    for rate in wanted.rates:
        work = mixed.mixed_load(server.url, server.model, rate, wanted.requests or MIXED_REQUESTS, f"{seed} {rate}")
        yield {"kind": "mixed", **_watched(server, work)}
    yield {"kind": "memory", "resident_gib": server.resident_gib}


def _shared_prefix(server: Running, seed: str, requests: int) -> Record:
    """One request with the same beginning has been served before."""
    shared = random_prompt(random.Random(f"{seed} prefix"), PREFIX)
    _closed_loop(server, f"{seed} first", 1, 1, PREFIX_REST, 1, shared)
    return _closed_loop(server, f"{seed} rest", PREFIX_STREAMS, requests, PREFIX_REST, PREFIX_OUTPUT, shared)


def _closed_loop(
    server: Running, seed: str, streams: int, requests: int, prompt: int, output: int, shared: Sequence[int] = ()
) -> Record:
    rng = random.Random(f"{seed} {streams}")
    asks = [Ask([*shared, *random_prompt(rng, prompt)], output) for _ in range(requests)]

    async def work() -> Record:
        return (await run_level(server.url, server.model, streams, asks)).summary()

    return _watched(server, work())


def _watched(server: Running, work: Coroutine[Any, Any, Record]) -> Record:
    with watch_cores(server.pid) as cores:
        found = asyncio.run(work)
    return {**found, **cores.to_json()}
