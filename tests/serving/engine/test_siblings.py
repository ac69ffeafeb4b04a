"""Several answers to one prompt: the prompt is computed once, and each answer is what it would be alone."""

import dataclasses

import pytest

from serving.errors import EngineFailed
from serving.request import FinishReason, SamplingParams, choice_seed
from tests.engines import CONFIG, GREEDY, PAGE_SIZE, request, run, tiny_engine

V = CONFIG.vocab_size
SEEDED = SamplingParams(temperature=1.3, seed=7, max_tokens=12)


def prompt(length):
    return [(5 + 17 * i) % V for i in range(length)]


def siblings(length, count=5, sampling=SEEDED, name="x"):
    """As the replica submits them."""
    return [
        request(
            f"{name}{i}",
            prompt(length),
            dataclasses.replace(sampling, seed=choice_seed(sampling.seed, i)),
            after=f"{name}0" if i else "",
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def alone():
    def answers(requests):
        return {
            r.request_id: run(tiny_engine(prefix_cache=False), [dataclasses.replace(r, after="")])[r.request_id]
            for r in requests
        }

    return answers


@pytest.mark.parametrize("length", [1, 4, 5, 33, 70, 130])
def test_they_equal_single_requests_and_their_prompt_is_computed_once(alone, length):
    requests, engine = siblings(length), tiny_engine()
    assert run(engine, requests) == alone(requests)
    shared = (length - 1) // PAGE_SIZE * PAGE_SIZE
    assert engine.stats.prefill_tokens == length + 4 * (length - shared)
    assert engine.stats.prefix_cache_hits == 4 * shared


@pytest.mark.parametrize(
    "changes", [{"prefix_cache": False}, {"overlap": False}, {"max_tiles": 1}, {"num_pages": 40}], ids=str
)
def test_however_the_engine_works(alone, changes):
    requests = [*siblings(70), *siblings(33, 3, name="y"), request("stranger", prompt(20)[::-1], GREEDY)]
    assert run(tiny_engine(**changes), requests) == alone(requests)


@pytest.mark.parametrize("step", range(5))
@pytest.mark.parametrize("gone", ["x0", "x2"])
def test_whoever_is_aborted_the_others_go_on(alone, gone, step):
    requests, engine, told = siblings(100, 4), tiny_engine(), {}
    for r in requests:
        engine.submit(r)
    for _ in range(step):
        engine.step()
    assert engine.abort(gone).finish_reason is FinishReason.ABORT
    while engine.has_work:
        engine.check_integrity()
        told |= {o.request_id: o.finish_reason for o in engine.step() if o.finish_reason}
    assert told == {r.request_id: FinishReason.LENGTH for r in requests if r.request_id != gone}
    assert engine.load.free_pages == engine.load.total_pages and engine.load.num_waiting == 0


def test_they_count_as_waiting_and_keep_their_place():
    engine = tiny_engine()
    for i in range(3):
        engine.submit(request(i, [i], dataclasses.replace(GREEDY, max_tokens=150)))
    for r in [*siblings(100, 3), request("later", [1, 2], GREEDY)]:
        engine.submit(r)
    assert engine.load.num_waiting == 7
    order = []
    while engine.has_work:
        order += [o.request_id for o in engine.step() if o.token_ids and o.request_id not in order]
    assert order[-4:] == ["x0", "x1", "x2", "later"]


def test_a_failed_step_ends_the_first_and_the_others_compute_it_anew(alone):
    requests, engine, answers = siblings(100, 3), tiny_engine(), {"x1": [], "x2": []}
    for r in requests:
        engine.submit(r)
    engine.step()
    assert [output.request_id for output in engine.recover(EngineFailed("test"))] == ["x0"]
    engine.check_integrity()
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
    assert answers == {name: tokens for name, (tokens, _) in alone(requests).items() if name != "x0"}
