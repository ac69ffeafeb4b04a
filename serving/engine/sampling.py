"""Choose one token per row on the device: greedy, or temperature with top-k, top-p and min-p.

A batch of greedy rows pays for an argmax only. The cuts are found without sorting the vocabulary: each is the largest
logit threshold that keeps enough, found exactly by a binary search over the bits of a float32 (32 passes). Order of the
filters as in Hugging Face transformers: temperature, top-k, top-p, min-p.

Randomness is a function of (seed, position) alone, so that an answer does not depend on its neighbours in the batch or
on having been preempted.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of R rows."""

    temperature_R: jax.Array
    """float32, 0 for greedy."""
    top_k_R: jax.Array
    """int32, 0 for all."""
    top_p_R: jax.Array
    """float32 in (0, 1]."""
    min_p_R: jax.Array
    """float32 in [0, 1]."""
    seed_R2: jax.Array
    """uint32: high and low half of each row's 64-bit seed."""
    position_R: jax.Array
    """int32: index in its sequence of the token to choose."""


def sample(logits_RV: jax.Array, rows: RowSampling) -> jax.Array:
    """int32[R]. Ties are broken towards the lower token id."""
    greedy_R = jnp.argmax(logits_RV, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        drawn_R = _draw(logits_RV, rows)
        return jnp.where(rows.temperature_R > 0, drawn_R, greedy_R)

    return jax.lax.cond(jnp.any(rows.temperature_R > 0), draw, lambda: greedy_R)


def _draw(logits_RV: jax.Array, rows: RowSampling) -> jax.Array:
    """Gumbel-max over the tokens that survive the filters (Gumbel 1954; Maddison et al. 2014)."""
    top_R = jnp.max(logits_RV, axis=-1)
    hot_R = jnp.where(rows.temperature_R > 0, rows.temperature_R, 1.0)
    filters = jnp.any((rows.top_k_R > 0) | (rows.top_p_R < 1) | (rows.min_p_R > 0))
    floor_R = jax.lax.cond(
        filters, lambda: _floor(logits_RV, top_R, hot_R, rows), lambda: jnp.full(hot_R.shape, -jnp.inf)
    )
    scaled_RV = (logits_RV - top_R[:, None]) / hot_R[:, None]
    # The cut compares logits as they came. Scaled ones may be computed once more in another fusion and rounded
    # differently there, which could cut even the most likely token.
    kept_RV = jnp.where(logits_RV >= floor_R[:, None], scaled_RV, -jnp.inf)
    return jnp.argmax(kept_RV + _gumbel(rows, logits_RV.shape[-1]), axis=-1).astype(jnp.int32)


def _floor(logits_RV: jax.Array, top_R: jax.Array, hot_R: jax.Array, rows: RowSampling) -> jax.Array:
    """The lowest logit that survives all filters, float32[R]; never above the row's largest."""
    V = logits_RV.shape[-1]
    keep_R = jnp.where(rows.top_k_R > 0, jnp.minimum(rows.top_k_R, V), V)
    top_k_R = _largest_threshold(logits_RV, lambda kept: jnp.sum(kept, axis=-1) >= keep_R)
    likelihood_RV = jnp.exp((logits_RV - top_R[:, None]) / hot_R[:, None])
    mass_RV = jnp.where(logits_RV >= top_k_R[:, None], likelihood_RV, 0.0)
    wanted_R = rows.top_p_R * jnp.sum(mass_RV, axis=-1)

    def enough(kept_RV: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(kept_RV, mass_RV, 0.0), axis=-1) >= wanted_R

    # Rounding may leave the sum of everything a hair below `wanted`: top_p = 1 switches the filter off instead.
    top_p_R = jnp.where(rows.top_p_R < 1, _largest_threshold(logits_RV, enough), -jnp.inf)
    min_p_R = top_R + hot_R * jnp.log(rows.min_p_R)  # log(0) is -inf: no cut
    return jnp.minimum(jnp.maximum(jnp.maximum(top_k_R, top_p_R), min_p_R), top_R)


def _largest_threshold(values_RV: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest t, per row, for which keeping `values >= t` is `enough`; -inf if nothing is. Exact.

    Floats are mapped to unsigned integers of the same order, and the answer is built bit by bit from the top.
    """
    ordered_RV = _to_ordered(values_RV)

    def body(i: jax.Array, found_R: jax.Array) -> jax.Array:
        trial_R = found_R | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(enough(ordered_RV >= trial_R[:, None]), trial_R, found_R)

    found_R = jax.lax.fori_loop(0, 32, body, jnp.zeros(values_RV.shape[0], jnp.uint32))
    return jnp.where(found_R == 0, -jnp.inf, _from_ordered(found_R))


def _to_ordered(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _from_ordered(ordered: jax.Array) -> jax.Array:
    positive = ordered >> 31 == 1
    bits = jnp.where(positive, ordered & jnp.uint32((1 << 31) - 1), ~ordered)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _gumbel(rows: RowSampling, vocab_size: int) -> jax.Array:
    def one_row(seed_2: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed_2, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(one_row)(rows.seed_R2, rows.position_R)
