"""RowCache: pages as accelerators read them, in which a key is a row as a value is.

A page of one KV head is a matrix of tokens by head dim, whole tiles of a TPU's memory, so that one copy fetches it and
a few rows of it can be written alone. (On a CPU keys lie transposed: `kv.cache`.) The scales of a head's keys and
values are neighbours, so that a device's only head has two rows of them: one alone would be padded.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kv.cache import SCALE_DTYPE, ValuePages, encode, stored_dtype
from model import axes
from model.config import ModelConfig
from sharding.rules import ShardingRules


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowCache(ValuePages):
    heads_axis: ClassVar[int] = 2

    k_LPKGH: jax.Array
    """Keys after rope. Page 0 is the null page."""
    v_LPKGH: jax.Array
    scale_LPKG: jax.Array | None = None
    """Of int8 pages only. Along K those of keys and those of values of each KV head in turn."""
    widened: str | None = field(default=None, metadata={"static": True})
    """Type that keys and values of one byte are multiplied in; wider ones are multiplied as they lie."""

    @property
    def product_dtype(self) -> str:
        return self.widened or str(self.v_LPKGH.dtype)

    @property
    def pools(self) -> tuple[jax.Array, ...]:
        """The arrays, all with pages on axis 1, KV heads on axis 2 and tokens on axis 3."""
        return self.k_LPKGH, self.v_LPKGH, *(() if self.scale_LPKG is None else (self.scale_LPKG,))

    def encode(self, k_TKH: jax.Array, v_TKH: jax.Array) -> tuple[jax.Array, ...]:
        """Finite keys and values as each of `pools` holds them, [T, K, ..]."""
        k_TKH, k_scale_TK = encode(k_TKH, self.k_LPKGH.dtype)
        v_TKH, v_scale_TK = encode(v_TKH, self.v_LPKGH.dtype)
        if k_scale_TK is None or v_scale_TK is None:
            return k_TKH, v_TKH
        return k_TKH, v_TKH, jnp.stack([k_scale_TK, v_scale_TK], axis=2).reshape(k_scale_TK.shape[0], -1)

    def with_pools(self, pools: tuple[jax.Array, ...]) -> "RowCache":
        k_LPKGH, v_LPKGH, *scale = pools
        return replace(self, k_LPKGH=k_LPKGH, v_LPKGH=v_LPKGH, scale_LPKG=scale[0] if scale else None)


def abstract_row_cache(
    config: ModelConfig,
    head_dim: int,
    num_pages: int,
    page_size: int,
    dtype: str,
    mesh: Mesh,
    rules: ShardingRules,
    widened: str,
    num_layers: int | None = None,
) -> RowCache:
    """As `kv.cache.abstract_cache`, with rows of `head_dim` numbers, which may be more than the model's."""
    L, K, H = num_layers or config.num_layers, config.num_kv_heads, head_dim
    # any axis that is never split stands for None
    names = (axes.LAYERS, axes.HEAD_DIM, axes.KV_HEADS, axes.HEAD_DIM, axes.HEAD_DIM)

    def describe(shape: tuple[int, ...], dtype: jnp.dtype | str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rules.sharding(mesh, names[: len(shape)]))

    stored = stored_dtype(dtype)
    numbers = describe((L, num_pages, K, page_size, H), stored)
    scale = describe((L, num_pages, 2 * K, page_size), SCALE_DTYPE) if stored == jnp.int8 else None
    return RowCache(numbers, numbers, scale, widened if stored.itemsize == 1 else None)  # type: ignore[arg-type]
