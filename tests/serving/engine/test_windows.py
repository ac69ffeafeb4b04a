"""Pages that lie before the window of every layer are given back, whoever shares them or waits for them."""

import dataclasses
import random

import pytest

from serving.engine.build import TILE_TOKENS
from serving.engine.plan import Limits
from serving.request import FinishReason, SamplingParams
from tests.engines import CONFIG, MAX_SEQ_LEN, PAGE_SIZE, counted, counting_engine, request, run

WINDOW = 10
EVERYWHERE = dataclasses.replace(CONFIG, windows=(WINDOW,) * CONFIG.num_layers)
IN_ONE_LAYER = dataclasses.replace(CONFIG, windows=(WINDOW, *[None] * (CONFIG.num_layers - 1)))


def limits(max_trips):
    return Limits(PAGE_SIZE, TILE_TOKENS, max_tiles=1, max_trips=max_trips)


def most_pages_held(config, *, prompt, answer, max_trips):
    """By one sequence, once its first token has been read."""
    engine = counting_engine(limits(max_trips), config=config)
    engine.submit(request("long", range(prompt), SamplingParams(max_tokens=answer, ignore_eos=True)))
    most = 0
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        if engine.stats.generation_tokens:
            most = max(most, engine.load.total_pages - engine.load.free_pages)
    return most


@pytest.mark.parametrize(("prompt", "answer"), [(1, 150), (100, 50), (3, 20)])
@pytest.mark.parametrize("max_trips", [1, 4])
def test_a_sequence_holds_its_window_and_what_is_on_its_way(prompt, answer, max_trips):
    held = most_pages_held(EVERYWHERE, prompt=prompt, answer=answer, max_trips=max_trips)
    assert held <= -(-(WINDOW + 3 * max_trips) // PAGE_SIZE) + 1
    everything = -(-(prompt + answer) // PAGE_SIZE)
    assert everything - 1 <= most_pages_held(IN_ONE_LAYER, prompt=prompt, answer=answer, max_trips=max_trips)


@pytest.mark.parametrize("seed", range(8))
def test_the_books_are_right_in_any_traffic(seed):
    """Prompts that begin alike, few pages, arrivals at once or apart; answers stay what they are."""
    rng = random.Random(seed)
    texts = [[rng.randrange(50) for _ in range(90)] for _ in range(2)]
    requests = [
        request(name, rng.choice(texts)[: rng.randint(1, 90)], SamplingParams(max_tokens=rng.randint(1, 60)))
        for name in range(12)
    ]
    engine = counting_engine(
        limits(rng.choice([1, 4])), config=EVERYWHERE, num_pages=rng.choice([MAX_SEQ_LEN // PAGE_SIZE, 60])
    )
    answers = run(engine, requests, arrive_every=rng.choice([0, 1, 5]))
    for asked in requests:
        first, count = len(asked.token_ids), asked.sampling.max_tokens
        expected = [counted(position) for position in range(first, first + count)]
        assert answers[asked.request_id] == (expected, FinishReason.LENGTH)
