"""The cut of top-k, top-p and min-p against a sort in numpy, near the top and far from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving.engine.filters import CANDIDATES, look_nearby_first, lowest_kept, search_at_once

V = 1_000
LOGITS = np.random.default_rng(2).standard_normal((6, V)).astype(np.float32) * 1.5
cut = jax.jit(lowest_kept)
FORMS = jax.jit(look_nearby_first), jax.jit(search_at_once)


def kept(logits, temperature, top_k, top_p, min_p):
    """How many tokens survive, by sorting."""
    p = np.sort(np.exp((logits.astype(np.float64) - logits.max()) / temperature))[::-1]
    p = p[: top_k or V]
    if top_p < 1:
        p = p[: np.searchsorted(np.cumsum(p) / p.sum(), top_p) + 1]
    return int((p >= min_p).sum())


def survivors(temperature, top_k, top_p, min_p):
    as_rows = [np.broadcast_to(np.asarray(x, np.float32), len(LOGITS)) for x in (temperature, top_p, min_p)]
    hot, top_p, min_p = map(jnp.asarray, as_rows)
    floor_R = cut(jnp.asarray(LOGITS), hot, jnp.broadcast_to(jnp.asarray(top_k), len(LOGITS)), top_p, min_p)
    kept_RV = np.greater_equal(LOGITS, np.asarray(floor_R)[:, None])
    return np.sum(kept_RV, axis=1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 50, CANDIDATES, CANDIDATES + 1, 700, V, 5 * V])
@pytest.mark.parametrize(("top_p", "min_p"), [(1.0, 0.0), (0.5, 0.0), (0.97, 0.0), (0.999, 0.0), (0.9, 0.02)])
def test_as_many_survive_as_by_sorting(temperature, top_k, top_p, min_p):
    expected = [kept(row, temperature, min(top_k, V), top_p, min_p) for row in LOGITS]
    got = survivors(temperature, top_k, top_p, min_p)
    assert np.abs(np.subtract(got, expected)).max() <= 1  # the reference adds in float64
    assert got == expected or top_p < 1


def test_a_row_is_cut_alike_whatever_its_neighbours_make_the_batch_do():
    """Rows 0 to 2 are cut near the top; beside 3 to 5, which are not, the search runs for all."""
    top_k = [40, 0, 0, 700, 0, 0]
    top_p = [1.0, 0.3, 1.0, 1.0, 0.999, 0.999]
    together = survivors(1.0, top_k, top_p, 0.0)
    apart = [survivors(1.0, k, p, 0.0)[row] for row, (k, p) in enumerate(zip(top_k, top_p, strict=True))]
    assert together == apart
    assert together[:4] == [40, kept(LOGITS[1], 1.0, 0, 0.3, 0.0), V, 700]


def test_ties_at_the_cut_survive_together():
    logits = jnp.zeros((1, V)).at[0, :10].set(1.0)
    ones, zeros = jnp.ones(1), jnp.zeros(1)
    for top_k, survivors in ((3, 10), (11, V), (CANDIDATES + 1, V)):
        floor_R = cut(logits, ones, jnp.asarray([top_k]), ones, zeros)
        assert int(jnp.sum(logits >= floor_R[:, None])) == survivors


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (1, 1.0), (300, 1.0), (0, 0.5), (0, 0.999), (40, 0.9)])
def test_both_forms_cut_alike(top_k, top_p):
    """That of CPUs and that of accelerators, which a CPU does not run by itself."""
    logits, rows = jnp.asarray(LOGITS), len(LOGITS)
    top_R, ones = jnp.max(logits, axis=-1), jnp.ones(rows)
    likelihood = jnp.exp(logits - top_R[:, None])
    arguments = logits, likelihood, top_R, ones, jnp.full(rows, top_k), jnp.full(rows, top_p)
    near, far = (np.asarray(form(*arguments))[:, None] for form in FORMS)
    assert np.sum(near <= LOGITS, axis=1).tolist() == np.sum(far <= LOGITS, axis=1).tolist()
