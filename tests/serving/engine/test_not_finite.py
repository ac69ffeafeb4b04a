"""A model that gives NaN: whoever meets it fails alone, at once, and leaves nothing behind that others could read."""

import dataclasses

import jax.numpy as jnp
import jax.tree_util as tree
import numpy as np
import pytest

from model import packed
from serving.engine.api import SequenceOutput
from serving.engine.device_arrays import FlatWeights
from serving.errors import EngineFailed
from serving.request import FinishReason, SamplingParams
from tests.engines import CONFIG, GREEDY, PAGE_SIZE, request, run, tiny_engine

DAMAGED = 11
"""The token whose embedding is NaN."""
HOT = SamplingParams(temperature=1.3, seed=5, max_tokens=12)
CLEAN = [t for t in range(CONFIG.vocab_size) if t != DAMAGED]


def prompt(seed, length, damaged_at=None):
    tokens = [CLEAN[(seed + 17 * i) % len(CLEAN)] for i in range(length)]
    if damaged_at is not None:
        tokens[damaged_at] = DAMAGED
    return tokens


NEIGHBOURS = [
    request(f"neighbour {i}", prompt(i, length), sampling)
    for i, (length, sampling) in enumerate([(1, GREEDY), (33, HOT), (70, GREEDY)])
]


@pytest.fixture(scope="module")
def undisturbed():
    answers = run(tiny_engine(), NEIGHBOURS)
    assert not any(DAMAGED in tokens for tokens, _ in answers.values())
    return answers


@pytest.fixture
def damaged(monkeypatch):
    """An engine over compiled programs that get other weights."""

    def make(**changes):
        engine = tiny_engine(**changes)
        programs = engine._programs
        for name in ("_prefill_weights", "_decode_weights"):
            flat = getattr(programs, name)
            params = tree.tree_unflatten(flat.treedef, flat.leaves)
            table = params["embed"]["embedding"]
            panel, column = divmod(DAMAGED, packed.WIDTH)
            panels = table.panels.at[0, panel, :, column].set(jnp.nan)
            params["embed"]["embedding"] = dataclasses.replace(table, panels=panels)
            monkeypatch.setattr(programs, name, FlatWeights.of(params))
        return engine

    return make


def answers_of(engine, requests):
    """Answers and ends of all requests."""
    tokens, ends = {r.request_id: [] for r in requests}, {}
    for r in requests:
        engine.submit(r)
    while engine.has_work:
        for output in engine.step():
            assert output.request_id not in ends, "news after the end"
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                ends[output.request_id] = output
        engine.check_integrity()
    assert engine.load.free_pages == engine.load.total_pages
    return tokens, ends


def assert_failed(end: SequenceOutput):
    assert end.finish_reason is FinishReason.ERROR and isinstance(end.error, EngineFailed)
    assert end.error.http_status == 500 and "no finite logits" in str(end.error)


@pytest.mark.parametrize(("length", "at"), [(1, 0), (5, 4), (40, 3), (130, 1), (130, 129)])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_damaged_prompt_fails_alone(damaged, undisturbed, length, at, overlap):
    bad = [request("bad", prompt(3, length, at)), request("bad and hot", prompt(4, length, at), HOT)]
    tokens, ends = answers_of(damaged(overlap=overlap), [NEIGHBOURS[0], *bad, *NEIGHBOURS[1:]])
    for r in bad:
        assert_failed(ends[r.request_id])
        assert tokens[r.request_id] == []
    assert {r.request_id: (tokens[r.request_id], ends[r.request_id].finish_reason) for r in NEIGHBOURS} == undisturbed


@pytest.mark.parametrize("overlap", [True, False])
def test_an_answer_that_comes_upon_it_fails_from_there_on(damaged, undisturbed, overlap):
    steered = SamplingParams(temperature=0.0, logit_bias=((DAMAGED, 100.0),), logprobs=1, max_tokens=12)
    tokens, ends = answers_of(damaged(overlap=overlap), [*NEIGHBOURS, request("bad", prompt(3, 20), steered)])
    assert_failed(ends["bad"])
    assert tokens["bad"] == [DAMAGED]
    assert {r.request_id: (tokens[r.request_id], ends[r.request_id].finish_reason) for r in NEIGHBOURS} == undisturbed


def test_one_that_comes_upon_it_within_a_call_fails_there_and_stops_no_neighbour(damaged, undisturbed):
    steered = SamplingParams(temperature=0.0, logit_bias=((DAMAGED, 100.0),), max_tokens=12)
    engine = damaged(trips=8)
    tokens, ends = answers_of(engine, [*NEIGHBOURS, request("bad", prompt(3, 20), steered)])
    assert max(record.num_trips for record in engine.ring.records) > 1
    assert_failed(ends["bad"])
    assert tokens["bad"] == [DAMAGED]
    assert {r.request_id: (tokens[r.request_id], ends[r.request_id].finish_reason) for r in NEIGHBOURS} == undisturbed


def test_what_was_damaged_is_not_shared_and_what_came_before_is(damaged):
    engine = damaged()
    bad = request("bad", prompt(3, 60, damaged_at=2 * PAGE_SIZE))
    for _ in range(2):
        _, ends = answers_of(engine, [bad])
        assert_failed(ends["bad"])
        assert ends["bad"].cached_tokens <= 2 * PAGE_SIZE
    good = request("good", [*prompt(3, 2 * PAGE_SIZE), *prompt(9, 20)])
    tokens, ends = answers_of(engine, [good])
    assert (tokens["good"], FinishReason.LENGTH) == run(tiny_engine(prefix_cache=False), [good])["good"]


def test_pages_that_a_damaged_request_wrote_are_clean_for_the_next(damaged, undisturbed):
    """Few pages, so that each is used by both kinds: the next owner reads what lies behind its own tokens, times 0."""
    engine = damaged(num_pages=40, prefix_cache=False)
    for i in range(4):
        answers_of(engine, [request("bad", prompt(i, 150, damaged_at=i))])
        tokens, _ = answers_of(engine, NEIGHBOURS)
        assert {name: tokens[name] for name in undisturbed} == {name: t for name, (t, _) in undisturbed.items()}
    assert all(np.isfinite(leaf).all() for leaf in tree.tree_leaves(engine._programs._cache))


def test_damaged_batches_that_end_before_they_are_read_leave_nothing(damaged, undisturbed):
    """Aborted while the step that gives NaN is in flight."""
    engine = damaged()
    for step in range(1, 4):
        engine.submit(request("bad", prompt(3, 90, damaged_at=80)))
        for _ in range(step):
            engine.step()
        engine.abort("bad")
        tokens, _ = answers_of(engine, NEIGHBOURS)
        assert {name: tokens[name] for name in undisturbed} == {name: t for name, (t, _) in undisturbed.items()}
