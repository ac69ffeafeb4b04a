"""Pages that lie before the window of their layers are given back, whoever shares them or waits for them."""

import dataclasses
import random

import pytest

from serving.engine.build import TILE_TOKENS
from serving.engine.plan import Limits
from serving.request import Priority, SamplingParams
from tests.engines import (
    CONFIG,
    MAX_SEQ_LEN,
    PAGE_SIZE,
    PageCheckingPrograms,
    counted,
    counting_engine,
    request,
)

WINDOW = 10
EVERYWHERE = dataclasses.replace(CONFIG, windows=(WINDOW,) * CONFIG.num_layers)
GEMMA = dataclasses.replace(CONFIG, num_layers=13, windows=(*[*[WINDOW] * 5, None] * 2, WINDOW))  # 1 set of 7 sees all


def limits(max_trips):
    return Limits(PAGE_SIZE, TILE_TOKENS, max_tiles=1, max_trips=max_trips)


def most_pages_held(config, *, prompt, answer, max_trips, from_the_start=False):
    """By one sequence in each set of layers, once its first token has been read or from its first step on."""
    engine = counting_engine(limits(max_trips), config=config)
    engine.submit(request("long", range(prompt), SamplingParams(max_tokens=answer, ignore_eos=True)))
    table = engine._roster.table
    most = [0] * table.num_sets
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        if from_the_start or engine.stats.generation_tokens:
            most = [max(old, len(table.pages(0, of_set=number))) for number, old in enumerate(most)]
    return most


@pytest.mark.parametrize(("prompt", "answer"), [(1, 150), (100, 50), (3, 20)])
@pytest.mark.parametrize("max_trips", [1, 4])
def test_a_sequence_holds_its_window_and_what_is_on_its_way(prompt, answer, max_trips):
    at_most = -(-(WINDOW + 3 * max_trips) // PAGE_SIZE) + 1
    [held] = most_pages_held(EVERYWHERE, prompt=prompt, answer=answer, max_trips=max_trips)
    assert held <= at_most
    whole, *local = most_pages_held(GEMMA, prompt=prompt, answer=answer, max_trips=max_trips)
    assert whole >= -(-(prompt + answer) // PAGE_SIZE) - 1
    assert len(local) == 6 and max(local) <= at_most


def test_a_prompt_takes_no_more_than_its_window_and_two_chunks():
    """At any time: as many pages as it ever has at once are promised when it is admitted."""
    chunk = limits(1).chunk_tokens
    whole, *local = most_pages_held(GEMMA, prompt=158, answer=2, max_trips=1, from_the_start=True)
    assert whole == 40
    assert 40 > max(local) == -(-(WINDOW + 2 * chunk + 1) // PAGE_SIZE) + 1


@pytest.mark.parametrize(
    ("config", "seed", "host_pages"),
    [
        (EVERYWHERE, 0, 0),
        (EVERYWHERE, 1, 40),
        (CONFIG, 1, 40),
        *((GEMMA, seed, 0) for seed in (0, 2, 4)),
        (GEMMA, 1, 300),
        (GEMMA, 5, 300),
    ],
)
def test_every_token_sees_its_own_text_in_any_traffic(config, seed, host_pages):
    """Prompts that begin alike, of both bands, few pages, arrivals at once or apart, some leave, with and without pages
    that the host keeps: each page that is in a token's window holds what it should in every set of layers, and answers
    stay what they are."""
    rng = random.Random(seed)
    texts = [[rng.randrange(50) for _ in range(90)] for _ in range(2)]
    waiting = [
        request(
            name,
            rng.choice(texts)[: rng.randint(1, 90)],
            SamplingParams(max_tokens=rng.randint(1, 60)),
            priority=rng.choice([*Priority]),
        )
        for name in range(24)
    ]
    expected = {r.request_id: range(len(r.token_ids), len(r.token_ids) + r.sampling.max_tokens) for r in waiting}
    num_pages, apart = rng.choice([(24 if config is GEMMA else MAX_SEQ_LEN // PAGE_SIZE), 60]), rng.random()
    engine = counting_engine(
        limits(rng.choice([1, 4])),
        config=config,
        num_pages=num_pages,
        make=PageCheckingPrograms,
        overlap=seed > 0,
        num_host_pages=host_pages,
    )
    answers = {name: [] for name in expected}
    aborted = set()
    while waiting or engine.has_work:
        if waiting and rng.random() < apart:
            engine.submit(waiting.pop())
        if rng.random() < 0.02 and (ended := engine.abort(str(rng.randrange(24)))):
            aborted.add(ended.request_id)
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        engine.check_integrity()
    for name, positions in expected.items():
        whole = [counted(position) for position in positions]
        assert answers[name] == (whole[: len(answers[name])] if name in aborted else whole)
    assert engine.stats.prefix_cache_hits > 0 and (engine.stats.host_cache_hits > 0) == (host_pages > 0)
    assert engine.load.free_pages == engine.load.total_pages == num_pages
