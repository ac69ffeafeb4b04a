"""The TPU's paged-attention kernel: stores a tile's keys and values and attends to all pages of its sequence.

The grid is one program per query tile, run in order, or in two halves where a device has two cores and no tile needs
another. Pages are copied from HBM in blocks, into one of two buffers while the other is attended to; during a tile's
last block the first one of the next tile is on its way already. What the tile itself adds is laid into the block where
it belongs, and the rows around it (a *granule*: what memory can write alone) go back to HBM. A tile that follows in the
same sequence is not fetched before they have arrived there.

Written without reshapes of references, so that the same code runs in interpret mode.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kv.tpu_copies import KernelShape, Pool, TileCopies, each_head
from model.attention import MASKED, soft_cap


def attend_tile(
    call: Any,
    table: Any,
    first_S: Any,
    count_S: Any,
    next_S: Any,
    is_apart_S: Any,
    q: Any,
    *refs: Any,
    shape: KernelShape,
) -> None:
    """The kernel. Scalars: (layer, window) and those of a TilePlan. Then q [1, K, M, H], per pool what is new, the
    pools, the result [1, K, M, H], the pools again (the same memory), and scratch."""
    n = len(shape.granules)
    new, out, pages, blocks = refs[:n], refs[2 * n], refs[2 * n + 1 : 3 * n + 1], refs[3 * n + 1 : 4 * n + 1]
    top, total, progress, arriving, leaving = refs[4 * n + 1 :]
    pools = [Pool(*parts) for parts in zip(pages, new, blocks, shape.granules, strict=True)]
    tile = TileCopies(call, table, first_S, count_S, pools, arriving, leaving, shape)
    this = pl.program_id(0) * shape.tiles_per_part + pl.program_id(1)

    @pl.when(pl.program_id(1) == 0)
    def begin() -> None:
        progress[0], progress[1] = 0, 0  # the buffer of the next block; whether it is being filled
        for pool in pools[1:]:  # a share of 0 times what an unused buffer holds must be 0
            pool.blocks[...] = jnp.zeros(pool.blocks.shape, pool.blocks.dtype)

    @pl.when(count_S[this] == 0)
    def nothing() -> None:
        out[...] = jnp.zeros(out.shape, out.dtype)

    @pl.when(count_S[this] > 0)
    def attend() -> None:
        first_block, end_block = tile.blocks(this)
        following = next_S[this]
        after = jnp.minimum(following, shape.num_tiles - 1)
        is_followed = following < shape.num_tiles
        after_block, _ = tile.blocks(after)
        # of the same sequence, only a block before those that this tile writes may be fetched at any time
        is_before = after_block < first_S[this] // shape.block_tokens
        may_hurry = shape.tile_tokens == 1 or (is_apart_S[this] > 0) | is_before
        top[...] = jnp.full(top.shape, MASKED, top.dtype)
        total[...] = jnp.zeros(total.shape, total.dtype)
        out[...] = jnp.zeros(out.shape, out.dtype)

        @pl.when(progress[1] == 0)
        def fetch_own() -> None:
            tile.fetch(this, first_block, progress[0])

        def one_block(block: jax.Array, buffer: jax.Array) -> jax.Array:
            is_last = block + 1 == end_block
            other = 1 - buffer

            @pl.when(~is_last | (is_followed & may_hurry))
            def fetch_next() -> None:
                tile.fetch(jnp.where(is_last, after, this), jnp.where(is_last, after_block, block + 1), other)

            tile.await_block(this, block, buffer)
            tile.store(this, block, buffer)

            def one_strip(strip: jax.Array, _: None) -> None:
                def one_head(head: Any) -> None:
                    _attend_strip(head, strip, buffer, first_S[this], call[1], q, pools, top, total, out, shape)

                each_head(shape, one_head)

            jax.lax.fori_loop(*tile.strips(this, block), one_strip, None)
            tile.await_stores(this, block, buffer)

            if shape.tile_tokens > 1:

                @pl.when(is_last & is_followed & ~may_hurry)
                def fetch_late() -> None:
                    tile.fetch(after, after_block, other)

            return other

        progress[0] = jax.lax.fori_loop(first_block, end_block, one_block, progress[0])
        progress[1] = is_followed.astype(jnp.int32)
        is_token_M1 = _token_of_row(shape) < count_S[this]

        def finish(head: Any) -> None:
            result_MH = out[0, head] / jnp.maximum(total[head], 1e-30)
            out[0, head] = jnp.where(is_token_M1, result_MH, 0.0)

        each_head(shape, finish)


def _attend_strip(
    head: Any,
    strip: jax.Array,
    buffer: jax.Array,
    first: jax.Array,
    window: jax.Array,
    q: Any,
    pools: list[Pool],
    top: Any,
    total: Any,
    out: Any,
    shape: KernelShape,
) -> None:
    """One step of the online softmax."""
    C = shape.strip_tokens
    here = pl.ds(pl.multiple_of(strip % shape.strips_per_block * C, C), C)
    k_UH, v_UH = (pool.blocks[buffer, head, here].astype(shape.product_dtype) for pool in pools[:2])
    scores_MU = jax.lax.dot_general(q[0, head], k_UH, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    k_scale_1U, v_scale_1U = _scales(pools, buffer, head, here)
    if k_scale_1U is not None:
        scores_MU = scores_MU * k_scale_1U
    if shape.softcap is not None:
        scores_MU = soft_cap(scores_MU, shape.softcap)
    key_MU = strip * C + jax.lax.broadcasted_iota(jnp.int32, scores_MU.shape, 1)
    query_M1 = first + _token_of_row(shape)
    seen_MU = key_MU <= query_M1
    if shape.has_window:
        seen_MU &= key_MU > query_M1 - window
    scores_MU = jnp.where(seen_MU, scores_MU, MASKED)
    old_M1 = top[head]
    top_M1 = jnp.maximum(old_M1, jnp.max(scores_MU, axis=1, keepdims=True))
    weights_MU = jnp.where(seen_MU, jnp.exp(scores_MU - top_M1), 0.0)
    shrink_M1 = jnp.exp(old_M1 - top_M1)
    shares_MU = (weights_MU if v_scale_1U is None else weights_MU * v_scale_1U).astype(v_UH.dtype)
    mixed_MH = jax.lax.dot_general(shares_MU, v_UH, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    top[head] = top_M1
    total[head] = total[head] * shrink_M1 + jnp.sum(weights_MU, axis=1, keepdims=True)
    out[0, head] = out[0, head] * shrink_M1 + mixed_MH


def _scales(pools: list[Pool], buffer: jax.Array, head: Any, here: Any) -> tuple[jax.Array | None, jax.Array | None]:
    """float32[1, U] of the keys and of the values, if there are any."""
    if len(pools) == 2:
        return None, None
    k_scale_1U, v_scale_1U = (pools[2].blocks[buffer, 2 * head + i : 2 * head + i + 1, here] for i in (0, 1))
    return k_scale_1U.astype(jnp.float32), v_scale_1U.astype(jnp.float32)


def _token_of_row(shape: KernelShape) -> jax.Array:
    """int32[M, 1]: which of the tile's tokens a row of its score matrix belongs to."""
    row_M1 = jax.lax.broadcasted_iota(jnp.int32, (shape.rows, 1), 0)
    if shape.tile_tokens == 1:
        return jnp.zeros_like(row_M1)
    if shape.reps == 1:
        return row_M1
    # vectors of integers are not divided on a TPU; the half keeps the rounding of small floats away from the edges
    return ((row_M1.astype(jnp.float32) + 0.5) * (1 / shape.reps)).astype(jnp.int32)
