"""The device sampler draws from the distribution that its parameters describe, computed here in numpy by sorting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serving.engine.sampling import MOST_ROWS, RowSampling, draw_from_all
from serving.engine.slot_state import empty_slots
from serving.request import SamplingParams
from tests.sampler import CHI_SQUARE_LIMIT, DRAWS, VOCAB, assert_follows, draw, rows, sample_all


def expected_probabilities(logits, temperature, top_k, top_p, min_p):
    """Reference: sort, cut, renormalise, in the order temperature, top-k, top-p, min-p."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    p = np.exp(scaled - scaled.max())
    keep = np.zeros(len(p), bool)
    keep[order[: top_k or len(p)]] = True
    p = np.where(keep, p, 0)
    if top_p < 1:
        mass = np.cumsum(p[order]) / p.sum()
        keep[order[np.searchsorted(mass, top_p) + 1 :]] = False
    keep &= p >= min_p * p.max()
    p = np.where(keep, p, 0)
    return p / p.sum()


SETTINGS = [
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 0.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.5, "top_k": 5, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.6, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.01, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.2},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "min_p": 0.1},
]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_draws_follow_the_distribution(params):
    logits = np.random.default_rng(3).standard_normal(VOCAB).astype(np.float32) * 1.5
    tokens = draw(jnp.tile(logits, (DRAWS, 1)), rows(DRAWS, **params))
    assert_follows(tokens, expected_probabilities(logits, **params))


def test_one_draw_of_all_tokens_follows_the_distribution_too():
    """The form of accelerators, which a CPU does not run by itself."""
    probabilities = expected_probabilities(np.linspace(-3, 3, VOCAB, dtype=np.float32), 1.0, 30, 1.0, 0.0)
    log_mass = jnp.tile(jnp.log(jnp.asarray(probabilities, jnp.float32)), (DRAWS, 1))
    where = rows(DRAWS)
    assert_follows(np.asarray(draw_from_all(log_mass, where.seed_R2, where.position_R)), probabilities)


def test_the_chi_square_test_can_fail():
    logits = np.random.default_rng(3).standard_normal(VOCAB).astype(np.float32) * 1.5
    tokens = np.asarray(draw(jnp.tile(logits, (DRAWS, 1)), rows(DRAWS, temperature=1.2)))
    expected = expected_probabilities(logits, 1.0, 0, 1.0, 0.0) * DRAWS
    assert np.sum((np.bincount(tokens, minlength=VOCAB) - expected) ** 2 / expected) > CHI_SQUARE_LIMIT[VOCAB - 1]


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=VOCAB, max_size=VOCAB, unique=True),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.integers(0, VOCAB),
    st.sampled_from([1.0, 0.9, 0.5, 0.1]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
@example([*map(float, range(19)), 30.0, *(0.51 + i / 99 for i in range(20))], 0.3, 0, 0.9, 0.0)
@settings(max_examples=40, deadline=None)
def test_no_token_outside_the_filters_is_ever_drawn(values, temperature, top_k, top_p, min_p):
    logits = np.asarray(values, np.float32)
    tokens = np.asarray(draw(jnp.tile(logits, (64, 1)), rows(64, temperature, top_k, top_p, min_p)))
    # A hair of slack at the border: the reference works in float64.
    allowed = expected_probabilities(logits, temperature, top_k, min(1.0, top_p + 1e-5), max(0.0, min_p - 1e-5)) > 0
    assert allowed[tokens].all()


def test_greedy_rows_take_the_first_of_the_largest_beside_sampling_rows():
    logits = jnp.asarray([[0.0, 7.0, 7.0, 1.0]] * 3)
    mixed = rows(3, temperature=1.0)
    mixed = RowSampling(**{**vars(mixed), "temperature_R": jnp.asarray([0.0, 1.0, 0.0])})
    tokens = np.asarray(draw(logits, mixed))
    assert tokens[0] == tokens[2] == 1
    assert np.asarray(draw(logits, rows(3, temperature=0.0))).tolist() == [1, 1, 1]


def test_a_draw_depends_on_seed_and_position_alone():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((1, VOCAB)), jnp.float32)
    alone = int(draw(logits, rows(1, seed=9, position=5))[0])
    batch = draw(jnp.tile(logits, (7, 1)), rows(7, seed=9, position=5))
    assert np.asarray(batch).tolist() == [alone] * 7
    spread = {int(draw(logits, rows(1, seed=s, position=5))[0]) for s in range(30)}
    assert len(spread) > 5


def test_very_many_rows_say_what_a_part_of_them_says():
    """They are looked at block after block."""
    logits_RV = jnp.asarray(np.random.default_rng(1).standard_normal((2 * MOST_ROWS, VOCAB)), jnp.float32)
    asked = rows(2 * MOST_ROWS, temperature=0.9, top_k=9, params=SamplingParams(logprobs=2))
    state = empty_slots(1, VOCAB)
    part = slice(MOST_ROWS - 3, MOST_ROWS + 4)
    told = sample_all(logits_RV, asked, state)
    expected = sample_all(*jax.tree.map(lambda leaf: leaf[part], (logits_RV, asked)), state)
    for all_of_it, of_part in zip(jax.tree.leaves(told), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(all_of_it[part], of_part, rtol=1e-6)
