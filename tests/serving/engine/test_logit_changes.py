"""Penalties, biases, bans and min_tokens: exact against a loop in numpy, and drawn from the changed distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.engine.edits import MAX_EDITS, build_edits
from serving.engine.penalties import count_chosen
from serving.engine.slot_state import COUNTS, empty_slots
from serving.errors import InvalidRequest
from serving.request import SamplingParams
from tests.sampler import DRAWS, VOCAB, assert_follows, draw, edited, rows, written

LOGITS = np.random.default_rng(5).standard_normal(VOCAB).astype(np.float32) * 1.5
PROMPT, ANSWER, STOPS = (3, 4, 4, 9), (4, 7, 7, 7, 11), (0, 11)
BY_LIKELIHOOD = tuple(np.argsort(-LOGITS).tolist())

FEATURES = {
    "repetition": SamplingParams(repetition_penalty=1.7),
    "encouraged repetition": SamplingParams(repetition_penalty=0.6),
    "presence": SamplingParams(presence_penalty=1.1),
    "negative presence": SamplingParams(presence_penalty=-1.5),
    "frequency": SamplingParams(frequency_penalty=0.7),
    "bias": SamplingParams(logit_bias=((2, 1.5), (30, -2.0), (BY_LIKELIHOOD[0], -1.0))),
    "banned": SamplingParams(banned_token_ids=BY_LIKELIHOOD[:3]),
    "min_tokens": SamplingParams(min_tokens=6),
    "min_tokens reached": SamplingParams(min_tokens=5),
    "all": SamplingParams(
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=-0.3,
        logit_bias=tuple((i, i / 20 - 1) for i in range(0, VOCAB, 2)),
        banned_token_ids=(5, 8),
        min_tokens=6,
    ),
}
ids = st.integers(0, VOCAB - 1)
penalty = st.floats(-2, 2, width=32)
params = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.1, 3.0]),
    presence_penalty=penalty,
    frequency_penalty=penalty,
    logit_bias=st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=VOCAB).map(lambda d: tuple(d.items())),
    banned_token_ids=st.lists(ids, max_size=8).map(tuple),
    min_tokens=st.integers(0, 8),
)


def softmax(logits):
    p = np.exp(logits.astype(np.float64) - logits.max())
    return p / p.sum()


@pytest.mark.parametrize("name", FEATURES)
def test_draws_follow_the_changed_distribution(name):
    changed = edited(LOGITS, FEATURES[name], PROMPT, ANSWER, STOPS)
    state, num_edits = written(FEATURES[name], PROMPT, ANSWER, STOPS)
    at = len(PROMPT) + len(ANSWER)
    seeds = jnp.arange(DRAWS)  # all at one position, so that min_tokens counts the same for all
    asked = rows(DRAWS, params=FEATURES[name], num_edits=num_edits, position=at, seed=seeds)
    assert_follows(draw(jnp.tile(LOGITS, (DRAWS, 1)), asked, state), softmax(changed))


@pytest.mark.parametrize("name", [name for name in FEATURES if name != "min_tokens reached"])
def test_every_feature_changes_the_distribution(name):
    assert not np.array_equal(edited(LOGITS, FEATURES[name], PROMPT, ANSWER, STOPS), LOGITS)


@settings(max_examples=60, deadline=None)
@given(
    params=params,
    logits=st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB),
    prompt=st.lists(ids, max_size=10),
    answer=st.lists(ids, max_size=10),
    stop_ids=st.frozensets(ids, max_size=3),
)
def test_greedy_takes_the_largest_changed_logit(params, logits, prompt, answer, stop_ids):
    state, num_edits = written(params, prompt, answer, stop_ids, slot=1)
    position = len(prompt) + len(answer)
    asked = rows(2, temperature=0.0, params=params, num_edits=num_edits, position=position, slot=1)
    tokens = draw(jnp.asarray([logits] * 2, jnp.float32), asked, state)
    changed = edited(logits, params, prompt, answer, stop_ids)
    assert tokens[0] == tokens[1]
    assert changed[tokens[0]] >= changed.max() - 1e-5  # XLA may fuse a product and a sum into one rounding


def test_counting_on_the_device_equals_counting_on_the_host():
    p = FEATURES["frequency"]
    state, _ = written(p, PROMPT, ())
    counts = state.counts_BV
    for token in ANSWER:
        slots, tokens = jnp.asarray([0, 1]), jnp.asarray([token, token])
        counts = count_chosen(counts, slots, tokens, jnp.asarray([True, False]))
    assert np.array_equal(counts, written(p, PROMPT, ANSWER)[0].counts_BV)


def test_a_slot_forgets_its_last_owner_and_leaves_its_neighbours_alone():
    p = FEATURES["all"]
    state, _ = written(p, PROMPT, ANSWER, STOPS, slot=1)
    state, num_edits = written(SamplingParams(presence_penalty=1.0), (1,), (2,), slot=1, state=state)
    assert num_edits == 0
    assert np.flatnonzero(state.counts_BV[1]).tolist() == [1, 2]
    state, _ = written(p, PROMPT, ANSWER, STOPS, slot=2, state=state)
    assert np.flatnonzero(state.counts_BV[1]).tolist() == [1, 2]
    assert not state.counts_BV[0].any()


def test_what_a_former_owner_left_does_not_count_for_a_row_that_asks_nothing():
    """Beside a row that does: the branch runs, and the plain row must come out untouched."""
    state, num_edits = written(FEATURES["banned"], slot=0)
    state, _ = written(FEATURES["all"], PROMPT, ANSWER, STOPS, slot=1, state=state)
    asking = rows(1, temperature=0.0, params=FEATURES["banned"], num_edits=num_edits, slot=0)
    plain = rows(1, temperature=0.0, slot=1)
    both = jax.tree.map(lambda *parts: jnp.concatenate(parts), asking, plain)
    tokens = draw(jnp.tile(LOGITS, (2, 1)), both, state)
    assert tokens.tolist() == [BY_LIKELIHOOD[3], BY_LIKELIHOOD[0]]


def test_more_tokens_than_one_packet_holds():
    vocab = 3 * COUNTS
    prompt = [*range(0, vocab, 2), 0, 2]
    state, _ = written(FEATURES["repetition"], prompt, [1, 1], vocab=vocab)
    expected = np.zeros(vocab, np.int32)
    expected[prompt] = 1
    expected[1] = 4
    assert np.array_equal(state.counts_BV[0], expected)


def test_a_table_that_is_too_long_is_refused():
    long = SamplingParams(logit_bias=tuple((i, 1.0) for i in range(300)), min_tokens=1)
    assert build_edits(long, frozenset(range(200)), 5).shape == (3, 500)
    with pytest.raises(InvalidRequest, match=f"600 tokens together, at most {MAX_EDITS}"):
        build_edits(long, frozenset(range(300)), 5)


def test_the_largest_bias_forces_a_token_and_the_smallest_excludes_it():
    for bias in (100.0, -100.0):
        p = SamplingParams(logit_bias=((BY_LIKELIHOOD[0] if bias < 0 else 17, bias),))
        state, num_edits = written(p)
        tokens = draw(jnp.tile(LOGITS, (200, 1)), rows(200, params=p, num_edits=num_edits), state)
        assert (set(tokens.tolist()) == {17}) if bias > 0 else (BY_LIKELIHOOD[0] not in tokens)


def test_an_empty_state_is_all_zeros():
    assert not any(np.asarray(leaf).any() for leaf in vars(empty_slots(2, 8)).values())
