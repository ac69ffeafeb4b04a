"""Several tokens per device call equal one by one, whatever ends in the middle of a call."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving.engine.logprobs import no_logprobs
from serving.engine.trips import ENDED, TripState, run_trips
from serving.request import FinishReason, SamplingParams
from tests.engines import CONFIG, decode_memory, request, run, tiny_engine

V = CONFIG.vocab_size
EOS = 11
GREEDY = SamplingParams(temperature=0.0, max_tokens=30)
HOT = SamplingParams(temperature=1.3, top_k=40, top_p=0.95, seed=7, max_tokens=41)
STEERED = dataclasses.replace(
    HOT, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((5, 2.0),), min_tokens=9
)


def prompt(seed):
    return [(13 * seed + 7 * j) % V for j in range(3 + 5 * seed)]


def four(*samplings):
    """As many requests as there are slots, so that nobody waits."""
    return [request(i, prompt(i), samplings[i % len(samplings)]) for i in range(4)]


@pytest.fixture(scope="module")
def stopping():
    """A greedy request that stops at one of its own tokens in the middle of a call of eight."""
    answer, _ = run(tiny_engine(), [request("x", prompt(2), GREEDY)])["x"]
    return request("stops", prompt(2), dataclasses.replace(GREEDY, stop_token_ids=(answer[12], EOS)))


@pytest.mark.parametrize("trips", [3, 8])
@pytest.mark.parametrize("overlap", [True, False])
def test_several_equal_one_by_one(stopping, trips, overlap):
    requests = [*four(GREEDY, HOT, STEERED)[:3], stopping]
    plain, looped = tiny_engine(eos=[EOS], overlap=overlap), tiny_engine(eos=[EOS], overlap=overlap, trips=trips)
    answers = run(looped, requests)
    assert answers == run(plain, requests)
    assert answers["stops"][1] is FinishReason.STOP
    assert looped.stats.generation_tokens == plain.stats.generation_tokens
    assert looped.stats.num_steps < plain.stats.num_steps / 2


def test_joining_and_leaving_beside_calls_of_several_tokens():
    requests = [request(i, prompt(i), [GREEDY, HOT, STEERED][i % 3]) for i in range(8)]
    expected = run(tiny_engine(), requests)
    for arrive_every in (2, 5):
        assert run(tiny_engine(trips=8), requests, arrive_every=arrive_every) == expected


def test_preempted_equals_undisturbed():
    kinds = [dataclasses.replace(sampling, max_tokens=80) for sampling in (GREEDY, HOT, STEERED)]
    requests = four(*kinds)
    crowded = tiny_engine(num_pages=58, trips=8)
    assert run(crowded, requests) == run(tiny_engine(), requests)
    assert crowded.stats.num_preemptions > 0


def test_calls_are_counted_and_a_lonely_stream_needs_few():
    engine = tiny_engine(trips=8)
    answer = run(engine, [request("x", [1, 2, 3], dataclasses.replace(GREEDY, max_tokens=1 + 4 * 8))])
    assert len(answer["x"][0]) == 33
    assert engine.stats.num_steps == 1 + 4
    assert [record.num_trips for record in engine.ring.records] == [1, 8, 8, 8, 8]


def test_an_answer_that_needs_a_look_at_each_token_gets_it():
    """Log-probabilities and many stop ids: everyone goes one by one meanwhile."""
    asking = dataclasses.replace(GREEDY, logprobs=2, max_tokens=9)
    many = dataclasses.replace(GREEDY, stop_token_ids=tuple(range(100, 110)))
    requests = [request("asks", prompt(1), asking), request("many", prompt(3), many), request("plain", prompt(2), HOT)]
    assert run(tiny_engine(trips=8), requests) == run(tiny_engine(), requests)


@pytest.mark.parametrize("steps", range(2, 7))
def test_abort_with_a_call_in_flight_leaves_the_others_alone(steps):
    requests = four(GREEDY, HOT)
    expected = run(tiny_engine(), requests)
    engine = tiny_engine(trips=4)
    for asked in requests:
        engine.submit(asked)
    tokens = {asked.request_id: [] for asked in requests}
    for step in range(100):
        if step == steps:
            assert engine.abort("1").finish_reason is FinishReason.ABORT
            engine.check_integrity()
            engine.submit(request("new", prompt(1), HOT))  # in the same slot, while the call in flight writes there
            tokens["new"] = []
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        engine.check_integrity()
    assert not engine.has_work and engine.load.free_pages == engine.load.total_pages
    assert tokens["1"] == expected["1"][0][: len(tokens["1"])]
    assert tokens["new"] == expected["1"][0]
    assert all(tokens[name] == expected[name][0] for name in ("0", "2", "3"))


def counted_trips(num_trips, newest, stop=99):
    """Tokens and the number of trips, for a model whose next token is the newest plus one and which ends at `stop`."""

    def trip(i, state):
        going_R = (i < jnp.asarray(num_trips)) & (state.newest_R != ENDED)
        next_R = state.newest_R + 1
        newest_R = jnp.where(going_R, jnp.where(next_R == stop, ENDED, next_R), state.newest_R)
        state = TripState(state.cache + 1, newest_R, state.counts_BV)
        return jnp.where(going_R, next_R, ENDED), no_logprobs(len(newest)), state

    start = TripState(jnp.int32(0), jnp.asarray(newest), jnp.zeros((1, 1), jnp.int32))
    tokens_RI, _, state = jax.jit(lambda: run_trips(trip, jnp.asarray(num_trips), start, 4))()
    return np.asarray(tokens_RI).tolist(), int(state.cache), state.newest_R.tolist()


def test_the_loop_ends_when_no_row_goes_on():
    assert counted_trips([3, 1, 0], [10, 20, 30]) == ([[11, 12, 13, -1], [21, -1, -1, -1], [-1] * 4], 3, [13, 21, 30])
    assert counted_trips([4, 4], [7, 6], stop=8) == ([[8, -1, -1, -1], [7, 8, -1, -1]], 2, [ENDED, ENDED])
    assert counted_trips([4, 4], [ENDED, ENDED]) == ([[-1] * 4] * 2, 0, [ENDED, ENDED])


def test_the_loop_keeps_one_copy_of_the_pages():
    memory, cache_bytes = decode_memory()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 2
