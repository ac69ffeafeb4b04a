"""KVCache: the device arrays that hold keys and values of all pages of all layers.

The layout is private to the attention seam. Here is that of XLA's form and of the CPU's kernel, ColumnCache: the tokens
of a page lie together, one KV head after the other, so that one head's part of a page is one run of memory. Keys lie
transposed: scores then add up whole rows of a page, as values do. Others are `kv.row_cache` and `kv.ragged_attention`.

int8 pages have a scale per token and KV head beside them. fp8 pages (float8_e4m3fn) have none: what exceeds their range
of 448 is clipped, which keys and values of a model that norms its activations do not. Short floats are held as their
bits (`model.bits`).
"""

from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from model import axes
from model.bits import as_bits, held_as, meant_by
from model.config import ModelConfig
from sharding.rules import ShardingRules

_AXES = (axes.LAYERS, None, axes.KV_HEADS, None, None)
_STORED = {"fp8": "float8_e4m3fn"}  # all others are called as NumPy calls them
SCALE_DTYPE = "bfloat16"  # numbers are rounded after their scale is, so that its rounding adds no error
_LEAST_SCALE = 2.0**-126  # what is smaller may be flushed to 0, which nothing can be divided by
_MOST_FP8 = 448.0  # beyond it a cast gives NaN


class KVCache(Protocol):
    """What all caches are, whatever their layout: a pytree of page arrays."""

    @property
    def num_pages(self) -> int:
        """The null page included."""
        ...

    @property
    def page_size(self) -> int: ...


CacheT = TypeVar("CacheT", bound=KVCache)


class ValuePages:
    """How many pages a cache has, and how long, for those whose values lie as `v_LPKGH`."""

    v_LPKGH: jax.Array

    @property
    def num_pages(self) -> int:
        """The null page included."""
        return int(self.v_LPKGH.shape[1])

    @property
    def page_size(self) -> int:
        return int(self.v_LPKGH.shape[3])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ColumnCache(ValuePages):
    k_LPKHG: jax.Array
    """Keys after rope. Page 0 is the null page."""
    v_LPKGH: jax.Array
    k_scale_LPKG: jax.Array | None = None
    """Of int8 pages only, like the next one."""
    v_scale_LPKG: jax.Array | None = None
    widened: str | None = field(default=None, metadata={"static": True})
    """Type that keys and values of one byte are multiplied in; wider ones are multiplied as they lie."""

    @property
    def product_dtype(self) -> str:
        return self.widened or self.dtype

    @property
    def dtype(self) -> str:
        """Of the numbers that pages hold."""
        return str(meant_by(self.v_LPKGH.dtype))

    def store(
        self, layer: jax.Array, pages_T: jax.Array, offsets_T: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array
    ) -> "ColumnCache":
        """The cache with these keys and values, which must be finite, at these places."""
        dtype = jnp.dtype(self.dtype)
        k_TKH, k_scale_TK = encode(k_TKH, dtype)
        v_TKH, v_scale_TK = encode(v_TKH, dtype)
        stored = replace(
            self,
            k_LPKHG=self.k_LPKHG.at[layer, pages_T, :, :, offsets_T].set(as_bits(k_TKH)),
            v_LPKGH=self.v_LPKGH.at[layer, pages_T, :, offsets_T, :].set(as_bits(v_TKH)),
        )
        if k_scale_TK is None or v_scale_TK is None or self.k_scale_LPKG is None or self.v_scale_LPKG is None:
            return stored
        return replace(
            stored,
            k_scale_LPKG=self.k_scale_LPKG.at[layer, pages_T, :, offsets_T].set(as_bits(k_scale_TK)),
            v_scale_LPKG=self.v_scale_LPKG.at[layer, pages_T, :, offsets_T].set(as_bits(v_scale_TK)),
        )


def encode(x_TKH: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array | None]:
    """Finite numbers as pages of this type hold them, and for int8 their scales, bfloat16[T, K]."""
    if dtype == jnp.int8:
        scale_TK = (jnp.max(jnp.abs(x_TKH), axis=-1) / 127).astype(SCALE_DTYPE)
        scale_TK = jnp.where(scale_TK > _LEAST_SCALE, scale_TK, jnp.ones_like(scale_TK))
        numbers_TKH = jnp.round(x_TKH / scale_TK.astype(jnp.float32)[..., None])
        return jnp.clip(numbers_TKH, -127, 127).astype(dtype), scale_TK
    if dtype == jnp.float8_e4m3fn:
        x_TKH = jnp.clip(x_TKH, -_MOST_FP8, _MOST_FP8)
    return x_TKH.astype(dtype), None


def stored_dtype(name: str) -> jnp.dtype:
    """Of pages: float32, bfloat16, int8 or fp8."""
    return jnp.dtype(_STORED.get(name, name))


def abstract_cache(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    dtype: str,
    mesh: Mesh,
    rules: ShardingRules,
    widened: str = "float32",
    num_layers: int | None = None,
) -> ColumnCache:
    """ShapeDtypeStructs with shardings: KV heads are split as the attention weights are.

    `dtype` is float32, bfloat16, int8 or fp8; the last two are multiplied as `widened`. A page holds tokens of
    `num_layers` layers, by default all.
    """
    L, K, H = num_layers or config.num_layers, config.num_kv_heads, config.head_dim

    def describe(shape: tuple[int, ...], dtype: jnp.dtype | str) -> jax.ShapeDtypeStruct:
        # any axis that is never split
        whole = [axes.HEAD_DIM if name is None else name for name in _AXES[: len(shape)]]
        return jax.ShapeDtypeStruct(shape, held_as(jnp.dtype(dtype)), sharding=rules.sharding(mesh, whole))

    stored = stored_dtype(dtype)
    k, v = (describe(shape, stored) for shape in ((L, num_pages, K, H, page_size), (L, num_pages, K, page_size, H)))
    scale = describe((L, num_pages, K, page_size), SCALE_DTYPE) if dtype == "int8" else None
    return ColumnCache(k, v, scale, scale, widened if stored.itemsize == 1 else None)  # type: ignore[arg-type]


def make_cache(abstract: CacheT) -> CacheT:
    """Allocate the pool, filled with zeros, shard by shard on its devices."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    zeros = jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract), out_shardings=shardings
    )
    return zeros()
