"""Traffic as in production: people beside batch work, and requests of all sizes that arrive in bursts.

Interactive protected: 4 interactive streams alone, then beside 24 batch streams and a 2,000-token prompt every second,
which may wait like the batch (as interactive ones, they alone would ask for more than two cores can prefill).
A server without priorities gets the same requests, all alike. Answers of the 4 differ in length: streams that march in
step would never meet each other's prompts when they are alone, but would as soon as anything disturbs them.

Mixed load: the same requests at the same times for every server. Good is an answer with its first token within
`SLO_TTFT_S` and then a token every `SLO_TPOT_S` on average.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.bench.load import Answer, Ask, Client, latencies, milliseconds, random_prompt

INTERACTIVE, BATCH = 4, 24
SLOTS, CONTEXT = 32, 2_560
"""What a server for this traffic must hold."""
LONG_PROMPT, LONG_ANSWER, LONG_EVERY_S = 2_000, 16, 1.0
SHORT_PROMPT, SHORT_ANSWERS, BATCH_ANSWERS = 128, (64, 192), (400, 400)

SLO_TTFT_S, SLO_TPOT_S = 2.0, 0.2
PROMPTS, ANSWERS = (10, 1_500), (5, 400)
SHARED_SHARE, SHARED_TOKENS, SHARED_PREFIXES = 0.3, 256, 4
BURSTINESS = 0.25  # shape of the gamma distribution of gaps: 1 is Poisson, less is burstier


async def interactive_protected(
    url: str, model: str, batch: Mapping[str, object], seed: str, phase_s: float
) -> dict[str, float | None]:
    """`batch` are the fields of a request that may wait. Ratios are of disturbed over alone."""
    rng = random.Random(seed)
    async with Client(url, model) as client:
        alone = await _interactive(client, rng, phase_s)
        async with _background(client, rng, batch):
            disturbed = await _interactive(client, rng, phase_s)
    before, after = _felt(alone), _felt(disturbed)
    ratios = {f"{name.removesuffix('_ms')}_ratio": _ratio(after[name], before[name]) for name in before}
    return {**{f"alone_{name}": value for name, value in before.items()}, **after, **ratios}


def _felt(answers: list[Answer]) -> dict[str, float | None]:
    """Requests still without a token count with the time that they have waited."""
    now = time.perf_counter()
    ttft_s = [answer.ttft_s or now - answer.sent_s for answer in answers]
    return {
        "ttft_p50_ms": milliseconds(ttft_s, 0.5),
        "itl_p99_ms": milliseconds([gap for answer in answers for gap in answer.gaps_s], 0.99),
    }


def _ratio(after: float | None, before: float | None) -> float | None:
    return round(after / before, 2) if after and before else None


async def _interactive(client: Client, rng: random.Random, phase_s: float) -> list[Answer]:
    """What the streams got in `phase_s` seconds, the last answers unfinished. The first ones come at once and do not
    count: in a slower phase they would be a larger part."""
    log: list[Answer] = []
    async with _streams(client, rng, INTERACTIVE, SHORT_ANSWERS, {}, log):
        await asyncio.sleep(phase_s)
    return log[INTERACTIVE:]


@asynccontextmanager
async def _background(client: Client, rng: random.Random, fields: Mapping[str, object]) -> AsyncIterator[None]:
    """Batch streams, all of which have begun to decode or wait when this is entered, and the long prompts."""
    log: list[Answer] = []
    async with _streams(client, rng, BATCH, BATCH_ANSWERS, fields, log):
        while sum(bool(answer.chunks_s) for answer in log) < BATCH:  # noqa: ASYNC110 - tasks fill the log
            await asyncio.sleep(0.05)
        async with asyncio.TaskGroup() as group:
            ticking = group.create_task(_long_prompts(client, rng, fields))
            yield
            ticking.cancel()


async def _long_prompts(client: Client, rng: random.Random, fields: Mapping[str, object]) -> None:
    log: list[Answer] = []
    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(client.ask(Ask(random_prompt(rng, LONG_PROMPT), LONG_ANSWER, fields), log))
            await asyncio.sleep(LONG_EVERY_S)


@asynccontextmanager
async def _streams(
    client: Client,
    rng: random.Random,
    count: int,
    answers: tuple[int, int],
    fields: Mapping[str, object],
    log: list[Answer],
) -> AsyncIterator[None]:
    """Streams with short prompts that never rest, cut off at the end."""

    async def stream() -> None:
        while True:
            ask = Ask(random_prompt(rng, SHORT_PROMPT), rng.randint(*answers), fields)
            await client.ask(ask, log)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream()) for _ in range(count)]
        yield
        for task in tasks:
            task.cancel()


@dataclass(frozen=True)
class Arrival:
    at_s: float
    ask: Ask


def arrivals(rng: random.Random, rate: float, count: int) -> list[Arrival]:
    """`count` requests, `rate` a second on average, in bursts; lengths are spread evenly over their logarithms."""
    prefixes = [random_prompt(rng, SHARED_TOKENS) for _ in range(SHARED_PREFIXES)]
    found, now_s = [], 0.0
    for _ in range(count):
        prompt = random_prompt(rng, _log_uniform(rng, *PROMPTS))
        if rng.random() < SHARED_SHARE:
            prompt = (rng.choice(prefixes) + prompt)[: PROMPTS[1]]
        found.append(Arrival(now_s, Ask(prompt, _log_uniform(rng, *ANSWERS))))
        now_s += rng.gammavariate(BURSTINESS, 1 / (rate * BURSTINESS))
    return found


def _log_uniform(rng: random.Random, least: int, most: int) -> int:
    return min(most, int(least * (most / least) ** rng.random()))


async def mixed_load(url: str, model: str, rate: float, count: int, seed: str) -> dict[str, float | None]:
    log: list[Answer] = []
    started = time.perf_counter()
    async with Client(url, model) as client, asyncio.TaskGroup() as group:
        for arrival in arrivals(random.Random(seed), rate, count):
            await asyncio.sleep(max(0.0, started + arrival.at_s - time.perf_counter()))
            group.create_task(client.ask(arrival.ask, log))
    wall_s = time.perf_counter() - started
    good = sum(map(is_good, log))
    return {
        "rate": rate,
        "good_share": round(good / len(log), 3),
        "goodput_per_s": round(good / wall_s, 3),
        "output_tokens_per_s": round(sum(answer.output_tokens for answer in log) / wall_s, 1),
        **latencies(log),
    }


def is_good(answer: Answer) -> bool:
    return answer.ttft_s is not None and answer.ttft_s <= SLO_TTFT_S and (answer.tpot_s or 0.0) <= SLO_TPOT_S
