"""Top-k, top-p and min-p as one cut: the lowest logit of each row that survives them all.

Nothing is sorted. A cut is the largest threshold that keeps enough weight, found exactly, bit by bit, over floats
mapped to integers of the same order. Order as in Hugging Face transformers: top-k, top-p of what is left, min-p.
"""

import jax
import jax.numpy as jnp

LANES = 128
_LOWEST = -(2**31)


def lowest_kept(
    logits_RV: jax.Array, hot_R: jax.Array, top_k_R: jax.Array, top_p_R: jax.Array, min_p_R: jax.Array
) -> jax.Array:
    """float32[R], never above the row's largest logit. `hot_R` is the temperature; see RowSampling for the others.

    A filter that no row uses costs nothing.
    """
    V = logits_RV.shape[1]
    top_R = jnp.max(logits_RV, axis=-1)
    ordered_RV = _to_ordered(logits_RV)
    likelihood_RV = jnp.exp((logits_RV - top_R[:, None]) / hot_R[:, None])
    keep_R = jnp.where(top_k_R > 0, jnp.minimum(top_k_R, V), V).astype(jnp.float32)

    def cut(stage: jax.Array, floor_R: jax.Array) -> jax.Array:
        """Stage 0 counts tokens, stage 1 weighs them. One loop serves both: it is compiled once."""
        by_count = stage == 0
        weight_RV = jnp.where(ordered_RV >= floor_R[:, None], jnp.where(by_count, 1.0, likelihood_RV), 0.0)
        wanted_R = jnp.where(by_count, keep_R, top_p_R * _sum(weight_RV))
        found_R = _largest_threshold(ordered_RV, weight_RV, wanted_R)
        # Rounding may leave the sum of everything a hair below `wanted`: top_p = 1 switches the filter off instead.
        return jnp.maximum(floor_R, jnp.where(by_count | (top_p_R < 1), found_R, _LOWEST))

    first = jnp.where(jnp.any(top_k_R > 0), 0, 1)
    last = jnp.where(jnp.any(top_p_R < 1), 2, 1)
    floor_R = jax.lax.fori_loop(first, last, cut, jnp.full(top_R.shape, _LOWEST, jnp.int32))
    min_p_cut_R = top_R + hot_R * jnp.log(min_p_R)  # log(0) is -inf: no cut
    cut_R = jnp.where(floor_R == _LOWEST, -jnp.inf, _from_ordered(floor_R))
    return jnp.minimum(jnp.maximum(cut_R, min_p_cut_R), top_R)


def _largest_threshold(ordered_RV: jax.Array, weight_RV: jax.Array, wanted_R: jax.Array) -> jax.Array:
    """The largest t, int32[R], for which `ordered >= t` weighs at least what is wanted; the lowest int if none does."""

    def body(i: jax.Array, found_R: jax.Array) -> jax.Array:
        trial_R = found_R + (jnp.int32(1) << (31 - i))  # the first step wraps around from the lowest to 0
        kept_R = _sum(jnp.where(ordered_RV >= trial_R[:, None], weight_RV, 0.0))
        return jnp.where(kept_R >= wanted_R, trial_R, found_R)

    return jax.lax.fori_loop(0, 32, body, jnp.full(wanted_R.shape, _LOWEST, jnp.int32))


def _sum(x_RV: jax.Array) -> jax.Array:
    """Over V, in LANES sums side by side: a CPU adds them as vectors, one sum alone it adds number by number."""
    return jnp.sum(jnp.sum(blocks(x_RV), axis=1), axis=-1)


def blocks(x_RV: jax.Array) -> jax.Array:
    """[R, ceil(V / LANES), LANES], zeros at the end."""
    R, V = x_RV.shape
    return jnp.pad(x_RV, ((0, 0), (0, -V % LANES))).reshape(R, -1, LANES)


def _to_ordered(x: jax.Array) -> jax.Array:
    """Floats as int32 of the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _from_ordered(ordered: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(ordered ^ ((ordered >> 31) & 0x7FFFFFFF), jnp.float32)
