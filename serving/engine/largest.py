"""The largest logits of each row, also where the vocabulary lies on several devices."""

import jax
import jax.numpy as jnp


def largest(logits_RV: jax.Array, num: int, shards: int) -> tuple[jax.Array, jax.Array]:
    """Values and token ids, float32 and int32[R, num], falling; equal ones in the order of ids.

    Each of `shards` equal parts of the vocabulary is looked through by itself first: what then travels between devices
    is the few largest of each, and not all logits.
    """
    R, V = logits_RV.shape
    if shards == 1:
        values_RX, ids_RX = jax.lax.top_k(logits_RV, num)
        return values_RX, ids_RX
    assert V % shards == 0, "a vocabulary that does not divide is not split"
    width = V // shards
    parts_RSC, lanes_RSC = jax.lax.top_k(logits_RV.reshape(R, shards, width), min(num, width))
    ids_RSC = lanes_RSC + (jnp.arange(shards, dtype=jnp.int32) * width)[:, None]
    values_RX, at_RX = jax.lax.top_k(parts_RSC.reshape(R, -1), num)
    return values_RX, jnp.take_along_axis(ids_RSC.reshape(R, -1), at_RX, axis=1, mode="promise_in_bounds")


def first_largest(values_RV: jax.Array) -> jax.Array:
    """int32[R], the index of each row's largest value, the lower one of equals; some index if a row has NaN. An argmax,
    but two plain reductions, which a TPU's compiler makes in a quarter of the time."""
    last = values_RV.shape[1] - 1
    largest_R1 = jnp.max(values_RV, axis=1, keepdims=True)
    return jnp.min(jnp.where(values_RV == largest_R1, jnp.arange(last + 1, dtype=jnp.int32), last), axis=1)


def largest_by_turns(logits_RV: jax.Array, count: int) -> jax.Array:
    """int32[R, count], what `jax.lax.top_k` says, for which a TPU's compiler takes half a minute. The next one is the
    largest of those that come after the last one: nothing is crossed out, so no logits are written."""
    R, V = logits_RV.shape
    tokens_V = jnp.arange(V, dtype=jnp.int32)

    def turn(last: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        value_R1, token_R = last
        is_equal_RV = (logits_RV == value_R1) & (tokens_V > token_R[:, None])
        left_RV = jnp.where((logits_RV < value_R1) | is_equal_RV, logits_RV, -jnp.inf)
        token_R = first_largest(left_RV)
        return (jnp.max(left_RV, axis=1, keepdims=True), token_R), token_R

    start = jnp.full((R, 1), jnp.inf), jnp.full(R, -1, jnp.int32)
    return jax.lax.scan(turn, start, length=count)[1].T
