"""Paged attention in plain XLA: runs everywhere, and is the oracle for kernels behind the same seam.

A step's flat tokens are cut into *query tiles*: Q consecutive tokens of one sequence. A decode row is a tile of one
token; a prefill chunk is a few tiles of a fixed Q. Tiles of one size form a `TileGroup` with static shape.

Pages are visited in blocks with an online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867), and the loop runs
only as far as the longest sequence of the step reaches: no shape depends on the context length.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp

from kv.cache import ColumnCache
from kv.layer_sets import LayerSets
from model.attention import MASKED, UNBOUNDED, AttentionFn, Window, soft_cap
from model.bits import as_numbers

BLOCK_TOKENS = 128  # keys per loop trip: long enough for full vectors, short enough not to waste half a trip


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TileGroup:
    """S tiles of Q tokens each; they follow each other in the step's flat token order."""

    pages_SJ: jax.Array
    """int32: the page row of the sequence that each tile belongs to; of several sets of layers one each, [W, S, J]."""
    positions_SQ: jax.Array
    """int32: position of each query in its sequence, -1 where padded."""

    def of_set(self, number: jax.Array) -> "TileGroup":
        return replace(self, pages_SJ=self.pages_SJ[number])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedView:
    """Where one step's tokens go and what they see. Groups cover the flat tokens in order."""

    groups: tuple[TileGroup, ...]
    sets: LayerSets | None = field(default=None, metadata={"static": True})
    """None where all layers have their pages in common."""

    def only_if(self, is_live: jax.Array) -> "PagedView":
        """The same, or padding alone: then nothing is stored, and nothing seen."""
        live = (TileGroup(group.pages_SJ, jnp.where(is_live, group.positions_SQ, -1)) for group in self.groups)
        return replace(self, groups=tuple(live))


class OfSets(Protocol):
    """What has page rows of every set of layers."""

    def of_set(self, number: jax.Array) -> Self:
        """With those of one."""
        ...


OfSetsT = TypeVar("OfSetsT", bound=OfSets)


def at_layer(
    sets: LayerSets | None, tiles: tuple[OfSetsT, ...], layer: jax.Array
) -> tuple[tuple[OfSetsT, ...], jax.Array]:
    """The page rows that this layer looks at, and its place in the page arrays."""
    if sets is None:
        return tiles, layer
    number = jnp.asarray(sets.set_of_layer, jnp.int32)[layer]
    return tuple(each.of_set(number) for each in tiles), jnp.asarray(sets.place_of_layer, jnp.int32)[layer]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepAttention:
    """The AttentionFn of one step as a tree of arrays, so that a mesh can hand it to each of its devices."""

    view: PagedView
    make: Callable[[PagedView], AttentionFn] = field(metadata={"static": True})
    """One of `kv.backends`."""

    def __call__(self, *arrays: Any, **how: Any) -> tuple[jax.Array, Any]:
        return self.make(self.view)(*arrays, **how)

    def only_if(self, is_live: jax.Array) -> "StepAttention":
        return StepAttention(self.view.only_if(is_live), self.make)


def step_attention(view: PagedView, make: Callable[[PagedView], AttentionFn], *, is_staged: bool) -> AttentionFn:
    """Of one step. What kernels need to know of its tiles is worked out once, before the layers, unless the layers run
    in stages."""
    return StepAttention(view, make) if is_staged else make(view)


DecodeKernel = Callable[
    [jax.Array, jax.Array, jax.Array, ColumnCache, jax.Array, jax.Array, jax.Array, Window, float | None],
    tuple[jax.Array, ColumnCache],
]
"""(q_SNH, k_SKH, v_SKH, cache, layer, pages_SJ, positions_S, window, softcap) -> float32[S, N, H] and the cache, for
tiles of one token: stores and attends as `paged_attention` does. Position -1 gives zeros."""


def paged_attention(view: PagedView, decode_kernel: DecodeKernel | None = None) -> AttentionFn:
    """The AttentionFn of one step. Stores the step's keys and values first, so that tokens see their own chunk.

    `decode_kernel` serves the groups of one-token tiles where there is a faster form than XLA's.

    The pool holds finite numbers only. A key that nobody may see has weight 0, but 0 times NaN is NaN: one in a page
    would spoil whoever gets that page next. So what is not finite is stored as 0, and its own token's result is NaN.

    Pages that lie before everybody's window are not visited, and need not be there: null pages may stand for them.
    """

    def attend(
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array,
        cache: ColumnCache,
        layer: jax.Array,
        *,
        window: Window = None,
        softcap: float | None = None,
    ) -> tuple[jax.Array, Any]:
        outputs, start = [], 0
        groups, layer = at_layer(view.sets, view.groups, layer)
        for group in groups:
            part = slice(start, start + group.positions_SQ.size)
            q, k, v = q_TNH[part], k_TKH[part], v_TKH[part]
            if decode_kernel is not None and group.positions_SQ.shape[1] == 1:
                positions_S = group.positions_SQ[:, 0]
                out, cache = decode_kernel(q, k, v, cache, layer, group.pages_SJ, positions_S, window, softcap)
            else:
                out, cache = _store_and_attend(q, k, v, cache, layer, group, window, softcap)
            outputs.append(out)
            start = part.stop
        return jnp.concatenate(outputs), cache

    return attend


def _store_and_attend(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    cache: ColumnCache,
    layer: jax.Array,
    group: TileGroup,
    window: Window,
    softcap: float | None,
) -> tuple[jax.Array, ColumnCache]:
    pages_T, offsets_T = destinations(group, cache.page_size)
    spoilt_TK = jnp.any(~(jnp.isfinite(k_TKH) & jnp.isfinite(v_TKH)), axis=-1)
    cache = cache.store(layer, pages_T, offsets_T, finite(k_TKH), finite(v_TKH))
    return spoil(_attend_tiles(q_TNH, cache, layer, group, window, softcap), spoilt_TK), cache


def finite(x_TKH: jax.Array) -> jax.Array:
    """What the pool may hold."""
    return jnp.where(jnp.isfinite(x_TKH), x_TKH, 0.0)


def spoil(out_TNH: jax.Array, spoilt_TK: jax.Array) -> jax.Array:
    """NaN for the query heads that share such a KV head, which needs no word between devices that split the heads."""
    T, N, H = out_TNH.shape
    grouped = out_TNH.reshape(T, spoilt_TK.shape[1], -1, H)
    return jnp.where(spoilt_TK[:, :, None, None], jnp.nan, grouped).reshape(T, N, H)


def destinations(group: TileGroup, page_size: int) -> tuple[jax.Array, jax.Array]:
    """Page and offset of every flat token; padding goes to the null page."""
    safe_SQ = jnp.maximum(group.positions_SQ, 0)
    found_SQ = jnp.take_along_axis(group.pages_SJ, safe_SQ // page_size, axis=1)
    pages_SQ = jnp.where(group.positions_SQ < 0, 0, found_SQ)
    return pages_SQ.reshape(-1), (safe_SQ % page_size).reshape(-1)


def _attend_tiles(
    q_TNH: jax.Array, cache: ColumnCache, layer: jax.Array, group: TileGroup, window: Window, softcap: float | None
) -> jax.Array:
    """Attention of one group's queries over their sequences' pages, float32[S * Q, N, H]."""
    S, Q = group.positions_SQ.shape
    N, H = q_TNH.shape[1:]
    K, G = cache.v_LPKGH.shape[2:4]
    reps = N // K
    # Rows of one KV head's score matrix: every query of the tile times every query head that shares the KV head.
    q_SKMH = q_TNH.reshape(S, Q, K, reps, H).transpose(0, 2, 1, 3, 4).reshape(S, K, Q * reps, H)
    q_SKMH = (q_SKMH / jnp.sqrt(jnp.float32(H))).astype(cache.product_dtype)
    positions_SM = jnp.repeat(group.positions_SQ, reps, axis=1)
    block = max(1, BLOCK_TOKENS // G)
    pages_SJ = _pad_to_multiple(group.pages_SJ, block)
    num_blocks = jnp.max(group.positions_SQ) // (block * G) + 1
    first_block = 0 if window is None else _first_seen(group.positions_SQ, window) // (block * G)

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        top_SKM, total_SKM, out_SKMH = carry
        pages_Sj = jax.lax.dynamic_slice_in_dim(pages_SJ, i * block, block, axis=1)
        k_SKHU = _gather(cache.k_LPKHG, layer, pages_Sj, tokens_axis=4).astype(q_SKMH.dtype)
        v_SKUH = _gather(cache.v_LPKGH, layer, pages_Sj, tokens_axis=3).astype(q_SKMH.dtype)
        scores_SKMU = jnp.einsum("SKMH,SKHU->SKMU", q_SKMH, k_SKHU, preferred_element_type=jnp.float32)
        scores_SKMU = _scaled(scores_SKMU, cache.k_scale_LPKG, layer, pages_Sj)
        if softcap is not None:
            scores_SKMU = soft_cap(scores_SKMU, softcap)
        keys_U = i * block * G + jnp.arange(block * G)
        seen_S1MU = keys_U <= positions_SM[:, None, :, None]
        if window is not None:
            seen_S1MU &= keys_U > positions_SM[:, None, :, None] - window
        scores_SKMU = jnp.where(seen_S1MU, scores_SKMU, MASKED)
        new_top = jnp.maximum(top_SKM, jnp.max(scores_SKMU, axis=-1))
        weights_SKMU = jnp.where(seen_S1MU, jnp.exp(scores_SKMU - new_top[..., None]), 0.0)
        shrink = jnp.exp(top_SKM - new_top)
        shares_SKMU = _scaled(weights_SKMU, cache.v_scale_LPKG, layer, pages_Sj).astype(v_SKUH.dtype)
        mixed = jnp.einsum("SKMU,SKUH->SKMH", shares_SKMU, v_SKUH, preferred_element_type=jnp.float32)
        total = total_SKM * shrink + jnp.sum(weights_SKMU, axis=-1)
        return new_top, total, out_SKMH * shrink[..., None] + mixed

    shape = (S, K, Q * reps)
    start = (jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, H), jnp.float32))
    _, total_SKM, out_SKMH = jax.lax.fori_loop(first_block, num_blocks, body, start)
    out_SKMH = out_SKMH / jnp.maximum(total_SKM, 1e-30)[..., None]  # padded queries see nothing and give zeros
    return out_SKMH.reshape(S, K, Q, reps, H).transpose(0, 2, 1, 3, 4).reshape(S * Q, N, H)


def _first_seen(positions_SQ: jax.Array, window: jax.Array | int) -> jax.Array:
    """The first position that any query sees; padded ones see none."""
    least = jnp.min(jnp.where(positions_SQ < 0, UNBOUNDED, positions_SQ))
    return jnp.maximum(least - window + 1, 0)


def _scaled(x_SKMU: jax.Array, scale_LPKG: jax.Array | None, layer: jax.Array, pages_Sj: jax.Array) -> jax.Array:
    """Times the scale of each token, where there are scales: cheaper here than on every number of its key or value."""
    if scale_LPKG is None:
        return x_SKMU
    return x_SKMU * _gather(scale_LPKG, layer, pages_Sj, tokens_axis=3).astype(jnp.float32)[:, :, None, :]


def _gather(pool: jax.Array, layer: jax.Array, pages_Sj: jax.Array, tokens_axis: int) -> jax.Array:
    """Some pages of each tile with their tokens in a row, [S, K, j * G, H] or [S, K, H, j * G]: one matrix, so one
    large product, per KV head. Of scales [S, K, j * G]."""
    pages = jnp.moveaxis(pool[layer, pages_Sj], 1, tokens_axis - 1)  # S, K, .., j, G, ..
    shape = list(pages.shape)
    shape[tokens_axis - 1 : tokens_axis + 1] = [shape[tokens_axis - 1] * shape[tokens_axis]]
    return as_numbers(pages.reshape(shape))


def _pad_to_multiple(pages_SJ: jax.Array, block: int) -> jax.Array:
    """Fill the page rows with null pages up to whole blocks, so that the last slice does not slide back."""
    missing = -pages_SJ.shape[1] % block
    return jnp.pad(pages_SJ, ((0, 0), (0, missing)))
