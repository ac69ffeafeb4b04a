"""The prefix cache in the engine: warm answers equal cold ones, and no step writes into a published page."""

import dataclasses
import random

import pytest

from kv.page_pool import PagePool
from serving.engine.api import SequenceOutput
from serving.errors import EngineFailed
from serving.request import FinishReason, SamplingParams
from tests.engines import CONFIG, GREEDY, PAGE_SIZE, WrittenPages, request, run, tiny_engine

V = CONFIG.vocab_size
BORDERS = [*range(1, 14), 31, 32, 33, 63, 64, 65, 66]


def prompt(seed, length):
    """Prompts of different seeds differ from their first token on."""
    return [(seed + 17 * i) % V for i in range(length)]


def cold_answers(requests):
    """One after the other, without a cache."""
    engine = tiny_engine(prefix_cache=False)
    return [run_one(engine, asked)[0] for asked in requests]


def run_one(engine, asked):
    """The answer of one request, and how many of its tokens were cached."""
    engine.submit(asked)
    outputs: list[SequenceOutput] = []
    while engine.has_work:
        outputs += engine.step()
        engine.check_integrity()
    return [token for output in outputs for token in output.token_ids], outputs[-1].cached_tokens


def test_warm_equals_cold_at_every_page_border():
    requests = [request(length, prompt(length, length)) for length in BORDERS]
    expected = cold_answers(requests)
    engine = tiny_engine()
    for asked, answer, length in zip(requests, expected, BORDERS, strict=True):
        assert run_one(engine, asked) == (answer, 0)
        assert run_one(engine, asked) == (answer, (length - 1) // PAGE_SIZE * PAGE_SIZE)


@pytest.mark.parametrize("shared", [3, 4, 5, 32, 33])
def test_a_common_beginning_is_computed_once_and_the_rest_is_its_own(shared):
    asked = request("second", [*prompt(1, shared), *prompt(2, 20)])
    [expected] = cold_answers([asked])
    engine = tiny_engine()
    run_one(engine, request("first", prompt(1, 50)))
    assert run_one(engine, asked) == (expected, shared // PAGE_SIZE * PAGE_SIZE)


def test_a_follow_up_turn_computes_only_its_new_tokens():
    turns, answers = [prompt(5, 50)], []
    for _ in range(4):
        answers += cold_answers([request("chat", turns[-1])])
        turns.append([*turns[-1], *answers[-1], 7, 8, 9])
    engine, known, computed = tiny_engine(), 0, 0
    for turn, answer in zip(turns, answers, strict=False):
        assert run_one(engine, request("chat", turn)) == (answer, known)
        assert engine.stats.prefill_tokens - computed == len(turn) - known
        computed = engine.stats.prefill_tokens
        # The last token of an answer is never fed back: it is new to the next turn.
        known = (len(turn) + len(answer) - 1) // PAGE_SIZE * PAGE_SIZE


def test_requests_at_once_share_what_was_computed_before_them():
    requests = [request(i, [*prompt(3, 100), i]) for i in range(4)]
    expected = run(tiny_engine(prefix_cache=False), requests)
    engine = tiny_engine(num_pages=60)
    run_one(engine, request("first", prompt(3, 100)))
    assert run(engine, requests) == expected
    assert engine.stats.num_preemptions == 0, "4 x 26 pages fit into 60 since 25 are shared"
    assert (engine.stats.prefix_cache_queries, engine.stats.prefix_cache_hits) == (100 + 4 * 101, 400)


def test_different_salts_never_share():
    engine = tiny_engine()
    for salt in ("", "a", "b"):
        asked = request("x", prompt(1, 40), cache_salt=salt)
        assert [run_one(engine, asked)[1] for _ in range(2)] == [0, 36]


def test_a_preempted_sequence_finds_its_own_pages_and_reports_them_to_nobody():
    requests = [request(i, prompt(i, 10 + i), SamplingParams(temperature=0.0, max_tokens=80)) for i in range(6)]
    warm, cold = tiny_engine(num_pages=44), tiny_engine(num_pages=44, prefix_cache=False)
    expected = run(cold, requests)
    assert run(warm, requests) == expected
    assert warm.stats.num_preemptions > 0 and warm.stats.prefix_cache_hits == 0
    assert warm.stats.prefill_tokens < cold.stats.prefill_tokens


def test_a_failed_step_leaves_nothing_cached():
    engine = tiny_engine()
    run_one(engine, request("x", prompt(1, 40)))
    engine.fail_all(EngineFailed("test"))
    assert run_one(engine, request("x", prompt(1, 40)))[1] == 0


@pytest.mark.parametrize("ending", ["stop", "abort"])
def test_the_step_in_flight_of_an_ended_sequence_spares_its_published_pages(ending):
    """One step is always ahead: it still writes for a sequence that ends, while others may share its pages already."""
    for length in range(1, 14):
        plain = request("x", prompt(length, length))
        [answer] = cold_answers([plain])
        tokens = answer[: answer.index(answer[7]) + 1]
        follow_up = request("y", [*plain.token_ids, *tokens, 1])
        [expected] = cold_answers([follow_up])

        pool, written = PagePool(129), WrittenPages()
        engine = tiny_engine(pool=pool, watch=written)
        stop_ids = (tokens[-1],) if ending == "stop" else ()
        engine.submit(dataclasses.replace(plain, sampling=dataclasses.replace(GREEDY, stop_token_ids=stop_ids)))
        seen = []
        while engine.load.num_running or engine.load.num_waiting:
            written.take()
            seen += [token for output in engine.step() for token in output.token_ids]
            if len(seen) == len(tokens) and ending == "abort":
                engine.abort("x")
        assert seen == tokens and engine.has_work, "a step is in flight"
        in_flight = written.take()
        assert in_flight and not in_flight & pool.kept_pages
        assert run_one(engine, follow_up) == (expected, (length + len(tokens) - 1) // PAGE_SIZE * PAGE_SIZE)


@pytest.mark.parametrize("seed", range(6))
def test_random_traces_under_pressure_answer_as_without_a_cache(seed):
    """Shared beginnings, few pages, on the device and on the host, arrivals, aborts and preemption: integrity after
    every step."""
    rng = random.Random(seed)
    requests = [
        request(
            i,
            [*prompt(rng.randrange(3), rng.randrange(40)), *prompt(rng.randrange(V), rng.randrange(1, 25))],
            SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, 50)),
            cache_salt=rng.choice(["", "", "tenant"]),
        )
        for i in range(40)
    ]
    expected = run(tiny_engine(prefix_cache=False), requests, check=False)
    pool, written = PagePool(rng.randrange(36, 60) + 1), WrittenPages()
    host_pages = [0, 0, 15, 15, 300, 300][seed]
    engine = tiny_engine(
        pool=pool, watch=written, max_tiles=rng.choice([1, 2]), trips=[1, 7][seed % 2], host_pages=host_pages
    )
    engine._roster.pages.host._most_copies = min(12, host_pages)
    answers, aborted = {r.request_id: [] for r in requests}, set()
    waiting = list(requests)
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.3:
            engine.submit(waiting.pop())
        if rng.random() < 0.03 and (ended := engine.abort(str(rng.randrange(40)))):
            aborted.add(ended.request_id)
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        engine.check_integrity()
        assert not written.take() & pool.kept_pages, "a step in flight writes into a published page"
    for name, (tokens, reason) in expected.items():
        assert reason is FinishReason.LENGTH
        assert answers[name] == (tokens[: len(answers[name])] if name in aborted else tokens)
    assert engine.stats.prefix_cache_hits > 0 and pool.num_free == pool.num_usable
    assert (engine.stats.host_cache_hits > 0) == (host_pages > 0)
    assert len(engine._roster.pages.host) <= host_pages and engine._roster.pages.host.num_copies_back >= 0
