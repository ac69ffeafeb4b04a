"""What kernels behind the attention seam share: each device attends with its own heads, and needs no other.

XLA cannot split a kernel's work, so it runs inside `shard_map`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from kv.paged_attention import finite, spoil
from model import axes
from model.attention import AttentionFn, Window
from sharding.rules import ShardingRules

Arrays = tuple[jax.Array, ...]

LocalAttention = Callable[[jax.Array, Arrays, Arrays, jax.Array, Window, float | None, Any], tuple[jax.Array, Arrays]]
"""(q_TNH, new, pools, layer, window, softcap, plan) -> [T, N, H] and the pools. Queries are scaled and have the type of
products; `new` is what the step adds to each pool, as the cache encodes it. Padded queries give zeros."""


class PoolCache(Protocol):
    """A cache as such kernels see it."""

    heads_axis: ClassVar[int]
    """Of `pools`: the KV heads, which are split over devices."""

    @property
    def product_dtype(self) -> str: ...
    @property
    def pools(self) -> Arrays: ...
    def encode(self, k_TKH: jax.Array, v_TKH: jax.Array) -> Arrays: ...
    def with_pools(self, pools: Arrays) -> Self: ...


@dataclass(frozen=True, slots=True)
class Split:
    """Over which mesh axes heads are split."""

    mesh: Mesh
    heads: Any
    kv_heads: Any
    cores_per_device: int = 1
    """That share the programs of a kernel."""

    @classmethod
    def of(cls, mesh: Mesh, rules: ShardingRules) -> "Split":
        cores = getattr(mesh.devices.flat[0], "num_cores", 1)  # only TPUs have it; 2 on v5p
        return cls(mesh, rules.mesh_axes[axes.HEADS] or None, rules.mesh_axes[axes.KV_HEADS] or None, cores)


def split_attention(split: Split, local: LocalAttention, plan: Any) -> AttentionFn:
    """The AttentionFn of one step over a PoolCache; otherwise as `kv.paged_attention.paged_attention`.

    `plan` is what `local` needs to know of the step: arrays that are the same for all layers and on all devices. Pools
    may be wider than heads: the rest of each row is zeros.
    """

    def attend(
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array,
        cache: PoolCache,
        layer: jax.Array,
        *,
        window: Window = None,
        softcap: float | None = None,
    ) -> tuple[jax.Array, Any]:
        static_window, traced_window = (None, window) if isinstance(window, jax.Array) else (window, None)

        def on_each_device(
            q_TNH: jax.Array,
            k_TKH: jax.Array,
            v_TKH: jax.Array,
            pools: Arrays,
            layer: jax.Array,
            traced_window: jax.Array | None,
            plan: Any,
        ) -> tuple[jax.Array, Arrays]:
            window = static_window if traced_window is None else traced_window
            # 0, or NaN if a number is not finite: a sum of floats, since one of bools is most of a TPU's program
            spoilt_TK = jnp.isnan(jnp.sum(k_TKH * 0 + v_TKH * 0, axis=-1))
            H, missing = q_TNH.shape[-1], pools[0].shape[-1] - q_TNH.shape[-1]
            q_TNH, k_TKH, v_TKH = (
                jnp.pad(x, ((0, 0), (0, 0), (0, missing))) for x in (q_TNH, finite(k_TKH), finite(v_TKH))
            )
            q_TNH = (q_TNH / jnp.sqrt(jnp.float32(H))).astype(cache.product_dtype)
            out_TNH, pools = local(q_TNH, cache.encode(k_TKH, v_TKH), pools, layer, window, softcap, plan)
            return spoil(out_TNH[..., :H].astype(jnp.float32), spoilt_TK), pools

        whole, queries, keys = PartitionSpec(), PartitionSpec(None, split.heads), PartitionSpec(None, split.kv_heads)
        pooled = PartitionSpec(*[None] * cache.heads_axis, split.kv_heads)
        manual = jax.sharding.get_abstract_mesh().manual_axes  # stages have split the mesh already
        shared = jax.shard_map(
            on_each_device,
            mesh=None if manual else split.mesh,
            axis_names={*split.mesh.axis_names} - {*manual},
            in_specs=(queries, keys, keys, pooled, whole, whole, whole),
            out_specs=(queries, pooled),
            check_vma=False,
        )
        out_TNH, pools = shared(q_TNH, k_TKH, v_TKH, cache.pools, layer, traced_window, plan)
        return out_TNH, cache.with_pools(pools)

    return attend
