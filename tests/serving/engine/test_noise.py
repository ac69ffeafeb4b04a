"""The noise is Gumbel distributed and independent over seeds, positions and counters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving.engine.noise import gumbel

N = 20_000
draw = jax.jit(gumbel, static_argnums=2)


def uniform(seed_high, seed_low, position, count=1):
    """The noise mapped back to what must be uniform."""
    rows = np.broadcast_arrays(seed_high, seed_low, position)
    high, low, position = (jnp.asarray(np.atleast_1d(x)) for x in rows)
    seeds = jnp.stack([high, low], axis=1).astype(jnp.uint32)
    noise = np.asarray(draw(seeds, position.astype(jnp.int32), count), np.float64)
    return np.exp(-np.exp(-noise)).ravel()


WAYS = {
    "over seeds": lambda: uniform(0, np.arange(N), 7),
    "over high seeds": lambda: uniform(np.arange(N), 1, 7),
    "over positions": lambda: uniform(0, 3, np.arange(N)),
    "over counters": lambda: uniform(0, 3, 7, N),
}


@pytest.mark.parametrize("way", WAYS)
def test_uniform(way):
    counts = np.histogram(WAYS[way](), bins=100, range=(0, 1))[0]
    assert np.sum((counts - N / 100) ** 2) / (N / 100) < 99 + 5 * np.sqrt(2 * 99) + 16


@pytest.mark.parametrize("way", WAYS)
def test_neighbours_do_not_resemble_each_other(way):
    u = WAYS[way]()
    for lag in (1, 2, 128):
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 5 / np.sqrt(N)


def test_seed_and_position_are_not_one_number():
    """Seed s at position p + 1 is not seed s + 1 at position p, and the halves of a seed are not alike."""
    seeds, positions = np.meshgrid(np.arange(100), np.arange(100))
    assert len(np.unique(uniform(0, seeds.ravel(), positions.ravel()))) > 9_980  # of 2^23 values, a few meet by chance
    assert len(np.unique(uniform(seeds.ravel(), positions.ravel(), 0))) > 9_980
