"""Log-probabilities are those of the raw softmax, computed here in float64, whatever else changed the choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving.engine.largest import largest_by_turns
from serving.engine.slot_state import empty_slots
from serving.request import MAX_LOGPROBS, SamplingParams
from tests.sampler import VOCAB, rows, sample_all, written

LOGITS = np.random.default_rng(8).standard_normal((3, VOCAB)).astype(np.float32) * 4


def raw(logits):
    wide = logits.astype(np.float64)
    top = wide.max(axis=-1, keepdims=True)
    return wide - top - np.log(np.exp(wide - top).sum(axis=-1, keepdims=True))


def host(logprobs, row, num_top):
    (entry,) = logprobs.read({row: num_top})[row]
    return entry


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_they_are_the_raw_distributions(temperature):
    params = SamplingParams(logprobs=5, presence_penalty=1.0, banned_token_ids=(int(LOGITS[0].argmax()),))
    state, num_edits = written(params, (), range(0, VOCAB, 2))
    asked = rows(3, temperature, params=params, num_edits=num_edits, top_k=3)
    tokens, logprobs = sample_all(jnp.asarray(LOGITS), asked, state)
    for row, token in enumerate(np.asarray(tokens).tolist()):
        got = host(logprobs, row, 5)
        assert got.logprob == pytest.approx(raw(LOGITS)[row, token], abs=1e-5)
        assert [i for i, _ in got.top] == np.argsort(-LOGITS[row])[:5].tolist()
        assert [p for _, p in got.top] == pytest.approx(np.sort(raw(LOGITS)[row])[::-1][:5], abs=1e-5)


def test_a_greedy_token_and_the_top_one_have_the_same_number():
    _, logprobs = sample_all(
        jnp.asarray(LOGITS), rows(3, 0.0, params=SamplingParams(logprobs=1)), empty_slots(1, VOCAB)
    )
    for row in range(3):
        got = host(logprobs, row, 1)
        assert got.top == ((int(LOGITS[row].argmax()), got.logprob),)


def test_ties_are_in_the_order_of_ids_and_a_small_vocabulary_has_no_more_than_it_has():
    asked = rows(1, 0.0, params=SamplingParams(logprobs=MAX_LOGPROBS))
    _, logprobs = sample_all(jnp.zeros((1, 4)), asked, empty_slots(1, 4))
    top = host(logprobs, 0, MAX_LOGPROBS).top
    assert [i for i, _ in top] == [0, 1, 2, 3]
    assert [p for _, p in top] == pytest.approx([-np.log(4)] * 4)


def test_nobody_asked_and_nothing_is_computed():
    _, logprobs = sample_all(jnp.asarray(LOGITS), rows(3), empty_slots(1, VOCAB))
    assert not np.asarray(logprobs.logprobs_RX).any()


def test_accelerators_find_the_same_rivals():
    """The form that a CPU does not run by itself; ties are in the order of token ids."""
    logits = jnp.asarray(np.round(LOGITS) + 0.0)  # no -0, which is sorted below 0
    np.testing.assert_array_equal(largest_by_turns(logits, MAX_LOGPROBS), jax.lax.top_k(logits, MAX_LOGPROBS)[1])
