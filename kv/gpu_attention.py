"""Paged attention on GPUs, in Pallas (Triton): prefill and decode, over the pages of a RowCache where they lie.

A program serves one KV head of one query tile over one *part* of its sequence's pages; parts of long sequences run side
by side and are put together at the end (Flash-Decoding, Dao et al. 2023). XLA stores what is new before: a GPU scatters
in place.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kv.paged_attention import PagedView, TileGroup, at_layer, destinations
from kv.split_attention import Arrays, Split, split_attention
from model.attention import MASKED, UNBOUNDED, AttentionFn, Window, soft_cap

_STRIP_TOKENS = 64  # keys that are multiplied at once
_PART_TOKENS = 1024
_LEAST_ROWS = 16  # of a matrix that tensor cores multiply
_NUM_WARPS = 4


@dataclass(frozen=True, slots=True)
class _Shape:
    reps: int
    page_size: int
    pages_per_strip: int
    strips_per_part: int
    has_window: bool
    softcap: float | None

    @property
    def strip_tokens(self) -> int:
        return self.pages_per_strip * self.page_size


def gpu_attention(view: PagedView, split: Split, interpret: Any = False) -> AttentionFn:
    """The AttentionFn of one step over a RowCache; it equals `kv.paged_attention.paged_attention`."""

    def local(
        q_TNH: jax.Array,
        new: Arrays,
        pools: Arrays,
        layer: jax.Array,
        window: Window,
        softcap: float | None,
        groups: Any,
    ) -> tuple[jax.Array, Arrays]:
        groups, layer = at_layer(view.sets, groups, layer)
        parts = [destinations(group, pools[0].shape[3]) for group in groups]
        pages_T, offsets_T = (jnp.concatenate(x) for x in zip(*parts, strict=True))
        pools = tuple(pool.at[layer, pages_T, :, offsets_T].set(x) for pool, x in zip(pools, new, strict=True))
        outputs, start = [], 0
        for group in groups:
            q = q_TNH[start : start + group.positions_SQ.size]
            outputs.append(_attend_group(q, pools, layer, window, group, softcap, interpret))
            start += group.positions_SQ.size
        return jnp.concatenate(outputs), pools

    return split_attention(split, local, view.groups)


def _attend_group(
    q_TNH: jax.Array,
    pools: Arrays,
    layer: jax.Array,
    window: Window,
    group: TileGroup,
    softcap: float | None,
    interpret: Any,
) -> jax.Array:
    """float32[S * Q, N, H]: attention of one group's queries over pages that hold the step's own keys."""
    S, Q = group.positions_SQ.shape
    N, H = q_TNH.shape[1:]
    K, G = pools[0].shape[2:4]
    reps = N // K
    M = max(_LEAST_ROWS, pl.next_power_of_2(Q * reps))
    shape = _Shape(
        reps=reps,
        page_size=G,
        pages_per_strip=max(_STRIP_TOKENS // G, 1),
        strips_per_part=max(_PART_TOKENS // max(_STRIP_TOKENS, G), 1),
        has_window=window is not None,
        softcap=softcap,
    )
    pages_per_part = shape.pages_per_strip * shape.strips_per_part
    num_parts = -(-group.pages_SJ.shape[1] // pages_per_part)
    pages_SPj = jnp.pad(group.pages_SJ, ((0, 0), (0, -group.pages_SJ.shape[1] % pages_per_part)))
    pages_SPj = pages_SPj.reshape(S, num_parts, pages_per_part)
    q_SKMH = q_TNH.reshape(S, Q, K, reps, H).transpose(0, 2, 1, 3, 4).reshape(S, K, Q * reps, H)
    q_SKMH = jnp.pad(q_SKMH, ((0, 0), (0, 0), (0, M - Q * reps), (0, 0)))
    call = jnp.stack([layer, jnp.int32(UNBOUNDED if window is None else window)])
    first_S, last_S = jnp.maximum(group.positions_SQ[:, 0], 0), jnp.max(group.positions_SQ, axis=1)
    spans_S2 = jnp.stack([first_S, last_S], axis=1)
    whole = [pl.BlockSpec(pool.shape, lambda s, k, p, n=pool.ndim: (0,) * n) for pool in pools]
    totals = pl.BlockSpec((None, None, None, M), lambda s, k, p: (s, k, p, 0))
    out_SKPMH, top_SKPM, total_SKPM = pl.pallas_call(
        partial(_attend_part, shape=shape),
        grid=(S, K, num_parts),
        in_specs=[
            pl.BlockSpec((2,), lambda s, k, p: (0,)),
            pl.BlockSpec((None, 2), lambda s, k, p: (s, 0)),
            pl.BlockSpec((None, None, pages_per_part), lambda s, k, p: (s, p, 0)),
            pl.BlockSpec((None, None, M, H), lambda s, k, p: (s, k, 0, 0)),
            *whole,
        ],
        out_specs=[pl.BlockSpec((None, None, None, M, H), lambda s, k, p: (s, k, p, 0, 0)), totals, totals],
        out_shape=[
            jax.ShapeDtypeStruct((S, K, num_parts, M, H), jnp.float32),
            *[jax.ShapeDtypeStruct((S, K, num_parts, M), jnp.float32)] * 2,
        ],
        compiler_params=plgpu.CompilerParams(num_warps=_NUM_WARPS, num_stages=2),
        interpret=interpret,
        name="paged_attention",
    )(call, spans_S2, pages_SPj, q_SKMH, *pools)
    shrink_SKPM = jnp.exp(top_SKPM - jnp.max(top_SKPM, axis=2, keepdims=True))
    total_SKM = jnp.sum(total_SKPM * shrink_SKPM, axis=2)
    out_SKMH = jnp.sum(out_SKPMH * shrink_SKPM[..., None], axis=2) / jnp.maximum(total_SKM, 1e-30)[..., None]
    out_SQNH = out_SKMH[:, :, : Q * reps].reshape(S, K, Q, reps, H).transpose(0, 2, 1, 3, 4).reshape(S, Q, N, H)
    return jnp.where(group.positions_SQ[..., None, None] >= 0, out_SQNH, 0.0).reshape(S * Q, N, H)


def _attend_part(call: Any, span: Any, pages: Any, q: Any, *refs: Any, shape: _Shape) -> None:
    """The kernel: an online softmax over the strips of this part that a query of the tile sees."""
    *pools, out, top, total = refs
    layer, window, first, last = call[0], call[1], span[0], span[1]
    head, part = pl.program_id(1), pl.program_id(2)
    U, n = shape.strip_tokens, shape.pages_per_strip
    q_MH = q[...]
    M, H = q_MH.shape
    dtype = q_MH.dtype
    query_M = first + jax.lax.div(jnp.arange(M, dtype=jnp.int32), jnp.int32(shape.reps))
    start = part * shape.strips_per_part

    def load(pool: Any, strip: jax.Array, head: jax.Array) -> jax.Array:
        """[U, ..]: one head's part of the pages of a strip, one token after the other."""
        pages_n = pages[pl.ds((strip - start) * n, n)]
        found = pool[layer, pages_n, head]
        return found.reshape(U, *found.shape[2:])

    def one_strip(
        strip: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        top_M, total_M, out_MH = carry
        k_UH, v_UH = (load(pool, strip, head).astype(dtype) for pool in pools[:2])
        scores_MU = plgpu.dot(q_MH, k_UH.T).astype(jnp.float32)
        if len(pools) == 3:
            scores_MU = scores_MU * load(pools[2], strip, 2 * head).astype(jnp.float32)[None, :]
        if shape.softcap is not None:
            scores_MU = soft_cap(scores_MU, shape.softcap)
        key_U = strip * U + jnp.arange(U, dtype=jnp.int32)
        seen_MU = key_U[None, :] <= query_M[:, None]
        if shape.has_window:
            seen_MU &= key_U[None, :] > query_M[:, None] - window
        scores_MU = jnp.where(seen_MU, scores_MU, MASKED)
        new_M = jnp.maximum(top_M, jnp.max(scores_MU, axis=1))
        weights_MU = jnp.where(seen_MU, jnp.exp(scores_MU - new_M[:, None]), 0.0)
        shrink_M = jnp.exp(top_M - new_M)
        shares_MU = weights_MU
        if len(pools) == 3:
            shares_MU = weights_MU * load(pools[2], strip, 2 * head + 1).astype(jnp.float32)[None, :]
        mixed_MH = plgpu.dot(shares_MU.astype(dtype), v_UH).astype(jnp.float32)
        return new_M, total_M * shrink_M + jnp.sum(weights_MU, axis=1), out_MH * shrink_M[:, None] + mixed_MH

    seen_first = jnp.maximum(first - window + 1, 0) if shape.has_window else 0
    first_strip = jnp.maximum(seen_first // U, start)
    end_strip = jnp.minimum(last // U + 1, start + shape.strips_per_part)
    begin = jnp.full(M, MASKED, jnp.float32), jnp.zeros(M, jnp.float32), jnp.zeros((M, H), jnp.float32)
    end_strip = jnp.maximum(end_strip, first_strip)
    top[...], total[...], out[...] = jax.lax.fori_loop(first_strip, end_strip, one_strip, begin)
