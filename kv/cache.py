"""KVCache: the device arrays that hold keys and values of all pages of all layers.

The layout is private to the attention seam: the tokens of a page lie together, one KV head after the other, so that one
head's part of a page is one run of memory. Keys lie transposed: scores then add up whole rows of a page, as values do.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from model import axes
from model.config import ModelConfig
from sharding.rules import ShardingRules

_AXES = (axes.LAYERS, None, axes.KV_HEADS, None, None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    k_LPKHG: jax.Array
    """Keys after rope. Page 0 is the null page."""
    v_LPKGH: jax.Array

    @property
    def page_size(self) -> int:
        return int(self.v_LPKGH.shape[3])


def abstract_cache(
    config: ModelConfig, num_pages: int, page_size: int, dtype: str, mesh: Mesh, rules: ShardingRules
) -> KVCache:
    """ShapeDtypeStructs with shardings: KV heads are split as the attention weights are."""
    L, K, H = config.num_layers, config.num_kv_heads, config.head_dim

    def describe(shape: tuple[int, ...], names: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        whole = [axes.HEAD_DIM if name is None else name for name in names]  # any axis that is never split
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rules.sharding(mesh, whole))

    return KVCache(
        k_LPKHG=describe((L, num_pages, K, H, page_size), _AXES),  # type: ignore[arg-type]
        v_LPKGH=describe((L, num_pages, K, page_size, H), _AXES),  # type: ignore[arg-type]
    )


def make_cache(abstract: KVCache) -> KVCache:
    """Allocate the pool, filled with zeros, shard by shard on its devices."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    zeros = jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract), out_shardings=shardings
    )
    return zeros()
