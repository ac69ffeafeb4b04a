"""Top-k, top-p and min-p as one cut: the lowest logit of each row that survives them all.

On a CPU most cuts lie among a row's few most likely tokens and are read off there. Elsewhere, and for other rows, the
cut is the largest threshold that keeps enough weight, found exactly, bit by bit, over floats mapped to integers of the
same order. The vocabulary is never sorted. Order as in Hugging Face transformers: top-k, top-p of what is left, min-p.
"""

from functools import partial

import jax
import jax.numpy as jnp

from serving.engine.largest import largest

CANDIDATES = 256
_LOWEST = -(2**31)


def lowest_kept(
    logits_RV: jax.Array,
    hot_R: jax.Array,
    top_k_R: jax.Array,
    top_p_R: jax.Array,
    min_p_R: jax.Array,
    vocab_shards: int = 1,
) -> jax.Array:
    """float32[R], never above the row's largest logit. `hot_R` is the temperature; see RowSampling for the others."""
    top_R = jnp.max(logits_RV, axis=-1)
    top_k_R = jnp.where(top_k_R < logits_RV.shape[1], top_k_R, 0)
    likelihood_RV = _likelihood(logits_RV, top_R, hot_R)
    arguments = logits_RV, likelihood_RV, top_R, hot_R, top_k_R, top_p_R
    look_nearby = partial(look_nearby_first, vocab_shards=vocab_shards)
    cut_R = jax.lax.platform_dependent(*arguments, cpu=look_nearby, default=search_at_once)
    min_p_cut_R = top_R + hot_R * jnp.log(min_p_R)  # log(0) is -inf: no cut
    return jnp.minimum(jnp.maximum(cut_R, min_p_cut_R), top_R)


def look_nearby_first(
    logits_RV: jax.Array,
    likelihood_RV: jax.Array,
    top_R: jax.Array,
    hot_R: jax.Array,
    top_k_R: jax.Array,
    top_p_R: jax.Array,
    vocab_shards: int = 1,
) -> jax.Array:
    """The cut by top-k and top-p. A CPU finds a few candidates in the time of a few steps of the search."""
    near_R, is_near_R = _cut_nearby(logits_RV, likelihood_RV, top_R, hot_R, top_k_R, top_p_R, vocab_shards)

    def far() -> jax.Array:
        return jnp.where(is_near_R, near_R, _search_cut(logits_RV, likelihood_RV, top_k_R, top_p_R))

    return jax.lax.cond(jnp.all(is_near_R), lambda: near_R, far)


def search_at_once(
    logits_RV: jax.Array,
    likelihood_RV: jax.Array,
    _top_R: jax.Array,
    _hot_R: jax.Array,
    top_k_R: jax.Array,
    top_p_R: jax.Array,
) -> jax.Array:
    """The same where passes over the vocabulary are cheap and sorting is not."""
    return _search_cut(logits_RV, likelihood_RV, top_k_R, top_p_R)


def _cut_nearby(
    logits_RV: jax.Array,
    likelihood_RV: jax.Array,
    top_R: jax.Array,
    hot_R: jax.Array,
    top_k_R: jax.Array,
    top_p_R: jax.Array,
    vocab_shards: int,
) -> tuple[jax.Array, jax.Array]:
    """The cut by top-k and top-p if it lies among the candidates, and whether it does."""
    num = min(CANDIDATES, logits_RV.shape[1])
    values_RC, _ = largest(logits_RV, num, vocab_shards)
    by_count_R = jnp.where(top_k_R > 0, _pick(values_RC, jnp.clip(top_k_R, 1, num) - 1), -jnp.inf)
    total_R = jnp.sum(jnp.where(logits_RV >= by_count_R[:, None], likelihood_RV, 0.0), axis=-1)
    up_to_CC = jnp.triu(jnp.ones((num, num), jnp.float32))
    mass_RC = jnp.dot(_likelihood(values_RC, top_R, hot_R), up_to_CC, precision="highest")
    is_enough_RC = mass_RC >= (top_p_R * total_R)[:, None]
    by_mass_R = jnp.where(top_p_R < 1, _pick(values_RC, jnp.argmax(is_enough_RC, axis=-1)), -jnp.inf)
    is_near_R = (top_k_R <= num) & (jnp.any(is_enough_RC, axis=-1) | (top_p_R >= 1))
    return jnp.maximum(by_count_R, by_mass_R), is_near_R


def _search_cut(logits_RV: jax.Array, likelihood_RV: jax.Array, top_k_R: jax.Array, top_p_R: jax.Array) -> jax.Array:
    """The cut by top-k and top-p wherever it lies."""
    R, V = logits_RV.shape
    ordered_RV = _to_ordered(logits_RV)
    keep_R = jnp.where(top_k_R > 0, top_k_R, V).astype(jnp.float32)

    def cut(stage: jax.Array, floor_R: jax.Array) -> jax.Array:
        """Stage 0 counts tokens, stage 1 weighs them. One loop serves both: it is compiled once."""
        by_count = stage == 0
        weight_RV = jnp.where(ordered_RV >= floor_R[:, None], jnp.where(by_count, 1.0, likelihood_RV), 0.0)
        wanted_R = jnp.where(by_count, keep_R, top_p_R * jnp.sum(weight_RV, axis=-1))
        found_R = _largest_threshold(ordered_RV, weight_RV, wanted_R)
        # Rounding may leave the sum of everything a hair below `wanted`: top_p = 1 switches the filter off instead.
        return jnp.maximum(floor_R, jnp.where(by_count | (top_p_R < 1), found_R, _LOWEST))

    floor_R = jax.lax.fori_loop(0, 2, cut, jnp.full(R, _LOWEST, jnp.int32))
    return jnp.where(floor_R == _LOWEST, -jnp.inf, _from_ordered(floor_R))


def _largest_threshold(ordered_RV: jax.Array, weight_RV: jax.Array, wanted_R: jax.Array) -> jax.Array:
    """The largest t, int32[R], for which `ordered >= t` weighs at least what is wanted; the lowest int if none does."""

    def body(i: jax.Array, found_R: jax.Array) -> jax.Array:
        trial_R = found_R + (jnp.int32(1) << (31 - i))  # the first step wraps around from the lowest to 0
        kept_R = jnp.sum(jnp.where(ordered_RV >= trial_R[:, None], weight_RV, 0.0), axis=-1)
        return jnp.where(kept_R >= wanted_R, trial_R, found_R)

    return jax.lax.fori_loop(0, 32, body, jnp.full(wanted_R.shape, _LOWEST, jnp.int32))


def _likelihood(logits_RX: jax.Array, top_R: jax.Array, hot_R: jax.Array) -> jax.Array:
    """Relative to the most likely token's."""
    return jnp.exp((logits_RX - top_R[:, None]) / hot_R[:, None])


def _pick(values_RC: jax.Array, at_R: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values_RC, at_R[:, None], axis=1, mode="promise_in_bounds")[:, 0]


def _to_ordered(x: jax.Array) -> jax.Array:
    """Floats as int32 of the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _from_ordered(ordered: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(ordered ^ ((ordered >> 31) & 0x7FFFFFFF), jnp.float32)
