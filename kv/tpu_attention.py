"""Paged attention on TPUs: the kernel of `kv.tpu_kernel` behind the seam, on each device's own KV heads."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kv.paged_attention import PagedView, at_layer
from kv.split_attention import Arrays, Split, split_attention
from kv.tpu_copies import KernelShape, num_granules
from kv.tpu_kernel import attend_tile
from kv.tpu_limits import VMEM_BYTES, block_sizes, granule, vmem_bytes
from kv.tpu_plan import TilePlan, plan_tiles
from model.attention import UNBOUNDED, AttentionFn, Window


def tpu_attention(view: PagedView, split: Split, interpret: Any = False) -> AttentionFn:
    """The AttentionFn of one step over a RowCache; it equals `kv.paged_attention.paged_attention`.

    Tiles of one group and one sequence must follow each other in the order of their positions; a group of one-token
    tiles must have one for each sequence at most. `interpret` is what `pallas_call` takes.
    """

    def local(
        q_TNH: jax.Array,
        new: Arrays,
        pools: Arrays,
        layer: jax.Array,
        window: Window,
        softcap: float | None,
        plan: Any,
    ) -> tuple[jax.Array, Arrays]:
        outputs, start = [], 0
        plan, layer = at_layer(view.sets, plan, layer)
        for tiles in plan:
            part = slice(start, start + tiles.num_tiles * tiles.tile_tokens)
            added = tuple(x[part] for x in new)
            out, pools = _attend_tiles(q_TNH[part], added, pools, layer, window, tiles, softcap, interpret)
            outputs.append(out)
            start = part.stop
        return jnp.concatenate(outputs), pools

    return split_attention(split, local, tuple(plan_tiles(group, split.cores_per_device) for group in view.groups))


def _attend_tiles(
    q_TNH: jax.Array,
    new: Arrays,
    pools: Arrays,
    layer: jax.Array,
    window: Window,
    tiles: TilePlan,
    softcap: float | None,
    interpret: Any,
) -> tuple[jax.Array, Arrays]:
    """float32[S * Q, N, H] and the pools with what is new; one call of the kernel."""
    S, Q, J = tiles.num_tiles, tiles.tile_tokens, tiles.pages_per_slot
    N, H = q_TNH.shape[1:]
    K, G = pools[0].shape[2:4]
    granules = tuple(granule(pool.dtype, is_scale=pool.ndim == 4) for pool in pools)
    sizes = block_sizes(K, G, H, pools[0].dtype.itemsize, Q * N // K, J)
    shape = KernelShape(
        num_tiles=S,
        num_parts=tiles.num_parts,
        tile_tokens=Q,
        num_kv_heads=K,
        reps=N // K,
        head_dim=H,
        page_size=G,
        pages_per_slot=J,
        **sizes._asdict(),
        granules=granules,
        product_dtype=str(q_TNH.dtype),
        has_window=window is not None,
        softcap=softcap,
    )
    call = jnp.stack([layer, jnp.int32(UNBOUNDED if window is None else window)])
    scalars = call, *tiles.arrays
    q_SKMH = q_TNH.reshape(S, Q, K, N // K, H).transpose(0, 2, 1, 3, 4).reshape(S, K, shape.rows, H)
    added = [_aligned(x, tiles.first_S, Q, R) for x, R in zip(new, granules, strict=True)]

    def a_tile(whole: tuple[int, ...]) -> pl.BlockSpec:
        rest = (0,) * (len(whole) - 1)
        return pl.BlockSpec((1, *whole[1:]), lambda part, i, *_: (part * shape.tiles_per_part + i, *rest))

    anywhere = [pl.BlockSpec(memory_space=pl.ANY)] * len(pools)
    result = pl.pallas_call(
        partial(attend_tile, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(shape.num_parts, shape.tiles_per_part),
            in_specs=[*(a_tile(x.shape) for x in (q_SKMH, *added)), *anywhere],
            out_specs=[a_tile(q_SKMH.shape), *anywhere],
            scratch_shapes=[
                *(pltpu.VMEM((2, pool.shape[2], shape.block_tokens, *pool.shape[4:]), pool.dtype) for pool in pools),
                pltpu.VMEM((K, shape.rows, 1), jnp.float32),
                pltpu.VMEM((K, shape.rows, 1), jnp.float32),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((1,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q_SKMH.shape, jnp.float32),
            *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools),
        ],
        input_output_aliases={len(scalars) + 1 + len(pools) + i: 1 + i for i in range(len(pools))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_vmem_limit(shape, H, pools)
        ),
        interpret=interpret,
        name="paged_attention",
    )(*scalars, q_SKMH, *added, *pools)
    out_SKMH, *pools_after = result
    return out_SKMH.reshape(S, K, Q, N // K, H).transpose(0, 2, 1, 3, 4).reshape(S * Q, N, H), tuple(pools_after)


def _vmem_limit(shape: KernelShape, head_dim: int, pools: Arrays) -> int | None:
    """None where the usual one is enough, with room for what the compiler adds."""
    needed = vmem_bytes(
        shape.num_kv_heads, shape.rows, shape.tile_tokens, head_dim, shape.block_tokens, pools[0].dtype.itemsize
    )
    return None if needed < VMEM_BYTES * 3 // 4 else 2 * needed


def _aligned(x_TK: jax.Array, first_S: jax.Array, tile_tokens: int, granule: int) -> jax.Array:
    """[S, K, A, ..]: what each tile adds, moved to where it belongs within whole granules. Where that is one token, it
    is [S, K, ..] (of scales [S, K, 1]): the kernel lays it wherever it belongs."""
    if tile_tokens == 1:
        return x_TK if x_TK.ndim == 3 else x_TK[..., None]
    S = first_S.shape[0]
    x_SKQ = jnp.moveaxis(x_TK.reshape(S, tile_tokens, *x_TK.shape[1:]), 1, 2)
    token_SA = jnp.arange(num_granules(tile_tokens, granule) * granule) - (first_S % granule)[:, None]
    token_SA = jnp.clip(token_SA, 0, tile_tokens - 1)
    index = token_SA.reshape(S, 1, -1, *([1] * (x_SKQ.ndim - 3)))
    return jnp.take_along_axis(x_SKQ, index, axis=2)
