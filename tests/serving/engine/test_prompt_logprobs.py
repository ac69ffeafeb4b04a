"""Log-probabilities of prompts: the dense model's, whatever chunks, neighbours, cached pages or preemption."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import dense_attention
from serving.request import SamplingParams, choice_seed
from sharding.params import bind
from tests.engines import CONFIG, GREEDY, request, run, tiny_engine, tiny_params

V = CONFIG.vocab_size
LENGTHS = (1, 2, 5, 32, 33, 70, 130)
ASKED = dataclasses.replace(GREEDY, prompt_logprobs=3)


def prompt(length):
    return [(31 * length + 7 * j) % V for j in range(length)]


REQUESTS = [request(length, prompt(length), ASKED) for length in LENGTHS]


def answers_of(engine, requests, arrive_every=0):
    """(token ids, prompt log-probabilities) by request id; a prompt's come before its first token."""
    told, waiting, steps = {r.request_id: ([], []) for r in requests}, list(requests), 0
    while waiting or engine.has_work:
        while waiting and (not arrive_every or steps % arrive_every == 0):
            engine.submit(waiting.pop(0))
            if arrive_every:
                break
        for output in engine.step():
            tokens, entries = told[output.request_id]
            assert not (output.prompt_logprobs and tokens), "too late"
            entries += output.prompt_logprobs
            tokens += output.token_ids
        engine.check_integrity()
        steps += 1
    return told


@pytest.fixture(scope="module")
def alone():
    return {r.request_id: answers_of(tiny_engine(), [r])[r.request_id] for r in REQUESTS}


def test_they_are_those_of_the_dense_model(alone):
    decoder = bind(CONFIG, tiny_params())

    @jax.jit
    def log_softmax(tokens):
        positions = jnp.arange(len(tokens))
        logits, _ = decoder(tokens, positions, dense_attention(jnp.zeros_like(positions), positions))
        return jax.nn.log_softmax(logits)

    for r in REQUESTS:
        length = len(r.token_ids)
        padded = [*r.token_ids, *[0] * (160 - length)]
        expected_TV = np.asarray(log_softmax(jnp.asarray(padded)), np.float64)
        entries = alone[r.request_id][1]
        assert len(entries) == length - 1
        for expected_V, token, got in zip(expected_TV, r.token_ids[1:], entries, strict=False):
            assert got.logprob == pytest.approx(expected_V[token], abs=1e-5)
            assert [i for i, _ in got.top] == np.argsort(-expected_V, kind="stable")[:3].tolist()
            assert [p for _, p in got.top] == pytest.approx(np.sort(expected_V)[::-1][:3], abs=1e-5)
            assert got.rank == 1 + (expected_V > expected_V[token]).sum()


def test_asking_changes_no_token(alone):
    plain = run(tiny_engine(), [dataclasses.replace(r, sampling=GREEDY) for r in REQUESTS])
    assert {name: tokens for name, (tokens, _) in plain.items()} == {
        name: tokens for name, (tokens, _) in alone.items()
    }


@pytest.mark.parametrize(
    ("changes", "arrive_every"), [({}, 0), ({}, 2), ({"max_tiles": 1}, 0), ({"overlap": False}, 0)], ids=str
)
def test_together_and_in_other_chunks_they_are_the_same(alone, changes, arrive_every):
    neighbours = [request(f"n{i}", prompt(40 + i), GREEDY) for i in range(3)]
    told = answers_of(tiny_engine(**changes), [*neighbours[:1], *REQUESTS, *neighbours[1:]], arrive_every)
    assert {name: told[name] for name in alone} == alone
    assert not any(told[n.request_id][1] for n in neighbours)


def test_preemption_tells_nothing_twice(alone):
    engine = tiny_engine(num_pages=44)
    requests = [dataclasses.replace(r, sampling=dataclasses.replace(ASKED, max_tokens=12)) for r in REQUESTS]
    crowd = [request(f"n{i}", prompt(10 + i), SamplingParams(temperature=0.0, max_tokens=80)) for i in range(4)]
    told = answers_of(engine, [*crowd, *requests], arrive_every=3)
    assert engine.stats.num_preemptions
    assert {name: told[name] for name in alone} == alone


def test_what_is_cached_is_computed_again_if_it_must_be_told(alone):
    engine = tiny_engine()
    plain = request("plain", prompt(70), GREEDY)
    run(engine, [plain])
    assert answers_of(engine, [REQUESTS[5]])["70"] == alone["70"]
    before = engine.stats.prefill_tokens
    run(engine, [plain])
    assert engine.stats.prefill_tokens - before == 70 - 68, "it is shared with those who ask for nothing"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_siblings_come_after_the_prompt_was_told(alone, prefix_cache):
    engine = tiny_engine(prefix_cache=prefix_cache)
    others = [
        request(f"{i}", prompt(130), SamplingParams(seed=choice_seed(1, i), max_tokens=5), after="130") for i in (1, 2)
    ]
    order = []
    for r in [REQUESTS[-1], *others]:
        engine.submit(r)
    while engine.has_work:
        order += [(o.request_id, bool(o.prompt_logprobs)) for o in engine.step()]
    told = [place for place, (_, has_prompt) in enumerate(order) if has_prompt]
    assert {order[place][0] for place in told} == {"130"}
    assert max(told) < min(place for place, (name, _) in enumerate(order) if name != "130")
