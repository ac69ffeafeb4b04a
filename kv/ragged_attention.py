"""Paged attention on TPUs by jax's `ragged_paged_attention`: the same seam, with pages as that kernel wants them.

It does not store keys and values, so XLA scatters them first. All tiles of a step are one call.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import Mesh

from kv.cache import encode, stored_dtype
from kv.paged_attention import PagedView, TileGroup, destinations
from kv.split_attention import Arrays, Split, split_attention
from model import axes
from model.attention import AttentionFn, Window
from model.config import ModelConfig
from sharding.rules import ShardingRules

_LEAST_PAGE = 8
_BLOCK_TOKENS = 512
_QUERIES_PER_BLOCK = 32
_VMEM_BYTES = 32 << 20


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedCache:
    heads_axis: ClassVar[int] = 3

    kv_LPGKH: jax.Array
    """Along K a key after rope and a value of each KV head in turn. Page 0 is the null page."""

    @property
    def num_pages(self) -> int:
        """The null page included."""
        return int(self.kv_LPGKH.shape[1])

    @property
    def page_size(self) -> int:
        return int(self.kv_LPGKH.shape[2])

    @property
    def product_dtype(self) -> str:
        return "bfloat16" if self.kv_LPGKH.dtype.itemsize == 1 else str(self.kv_LPGKH.dtype)

    @property
    def pools(self) -> Arrays:
        return (self.kv_LPGKH,)

    def encode(self, k_TKH: jax.Array, v_TKH: jax.Array) -> Arrays:
        T, K, H = k_TKH.shape
        both_TKH = jnp.stack([k_TKH, v_TKH], axis=2).reshape(T, 2 * K, H)
        return (encode(both_TKH, self.kv_LPGKH.dtype)[0],)

    def with_pools(self, pools: Arrays) -> "RaggedCache":
        return replace(self, kv_LPGKH=pools[0])


def abstract_ragged_cache(
    config: ModelConfig,
    head_dim: int,
    num_pages: int,
    page_size: int,
    dtype: str,
    mesh: Mesh,
    rules: ShardingRules,
) -> RaggedCache:
    """As `kv.row_cache.abstract_row_cache`, of float32, bfloat16 or fp8."""
    shape = config.num_layers, num_pages, page_size, 2 * config.num_kv_heads, head_dim
    # any axis that is never split stands for pages and tokens
    names = (axes.LAYERS, axes.HEAD_DIM, axes.HEAD_DIM, axes.KV_HEADS, axes.HEAD_DIM)
    sharding = rules.sharding(mesh, names)
    return RaggedCache(jax.ShapeDtypeStruct(shape, stored_dtype(dtype), sharding=sharding))  # type: ignore[arg-type]


def ragged_attention(view: PagedView, split: Split) -> AttentionFn:
    """The AttentionFn of one step over a RaggedCache. A window must be the same number in all layers."""
    return split_attention(split, attend_locally, (view.groups, describe(view.groups)))


def attend_locally(
    q_TNH: jax.Array,
    new: Arrays,
    pools: Arrays,
    layer: jax.Array,
    window: Window,
    softcap: float | None,
    plan: Any,
) -> tuple[jax.Array, Arrays]:
    """A LocalAttention; the plan is the step's groups and what `describe` says of them."""
    assert window is None or isinstance(window, int), "the kernel is compiled for one window"
    (pool,), (new_TKH,), (groups, (lengths_S, starts_S, pages_SJ)) = pools, new, plan
    L, P, G = pool.shape[:3]
    places = [destinations(group, G) for group in groups]
    pages_T, offsets_T = (jnp.concatenate(x) for x in zip(*places, strict=True))
    pool = pool.at[layer, pages_T, offsets_T].set(new_TKH)
    out_TNH = ragged_paged_attention(
        q_TNH,
        pool.reshape(L * P, *pool.shape[2:]),  # the kernel sees all layers' pages: a layer's would be a copy
        lengths_S,
        pages_SJ + layer * P,
        starts_S,
        jnp.full(1, lengths_S.shape[0], jnp.int32),
        sliding_window=window,
        soft_cap=softcap,
        k_scale=1.0 if pool.dtype.itemsize == 1 else None,  # makes it widen them before products
        v_scale=1.0 if pool.dtype.itemsize == 1 else None,
        num_kv_pages_per_block=min(max(_BLOCK_TOKENS // G, 1), pages_SJ.shape[1]),
        num_queries_per_block=_QUERIES_PER_BLOCK,
        vmem_limit_bytes=_VMEM_BYTES,
    )
    positions_T = jnp.concatenate([group.positions_SQ.reshape(-1) for group in groups])
    return jnp.where(positions_T[:, None, None] >= 0, out_TNH, 0), (pool,)


def describe(groups: tuple[TileGroup, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tiles as the kernel's sequences: lengths int32[S], starts of their queries int32[S + 1], pages int32[S, J].

    To the kernel queries are the last tokens of a sequence, so padded ones count as tokens that come after it, and
    page rows get null pages for them.
    """
    lengths, sizes, pages = [], [0], []
    most = max(group.positions_SQ.shape[1] for group in groups)
    for group in groups:
        S, Q = group.positions_SQ.shape
        lengths.append(jnp.maximum(group.positions_SQ[:, 0], 0) + Q)
        sizes += [Q] * S
        pages.append(jnp.pad(group.pages_SJ, ((0, 0), (0, -(-most // _LEAST_PAGE)))))
    starts_S = jnp.cumsum(jnp.asarray(sizes, jnp.int32), dtype=jnp.int32)
    return jnp.concatenate(lengths).astype(jnp.int32), starts_S, jnp.concatenate(pages)
