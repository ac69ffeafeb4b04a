"""The attention seam, the projections around it, and dense attention: the reference that all others must equal.

The model does not know where keys and values are kept. It calls an `AttentionFn`, which the caller makes: dense for a
whole prompt at once (here), paged for serving (`kv.paged_attention`).
"""

import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from model import axes
from model.config import ModelConfig
from model.layers import RMSNorm, RopeTable, bias, is_merged, product, rotate, weight

MASKED = -1e30  # finite, so that a row with nothing to see gives zeros' average instead of NaN
UNBOUNDED = 1 << 30  # the window of a layer that has none, where others have one

Window = jax.Array | int | None
"""How many tokens a token sees, itself included: an int32 scalar where layers differ; None for all."""


class AttentionFn(Protocol):
    """Attend with causal masking; keys and values of this step are stored in `cache` on the way."""

    def __call__(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array,
        cache: Any,
        layer: jax.Array,
        *,
        window: Window = None,
        softcap: float | None = None,
    ) -> tuple[jax.Array, Any]:
        """Returns (float32[T, N, H], the cache with this step's keys and values). `layer` is an int32 scalar; with
        `softcap` scores are capped (`soft_cap`) before they are masked."""
        ...


class Attention(nnx.Module):
    """Grouped-query attention with rope (Ainslie et al. 2023, arXiv 2305.13245).

    `qkv` is one weight, so one product: for each KV head the query heads that share it, then its key, then its value.
    Split over KV heads it needs no communication. What a family has beside that, ModelConfig says.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, N, K, H = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
        names = (axes.EMBED, axes.KV_HEADS, axes.GROUP, axes.HEAD_DIM)
        self.qkv = weight(rngs, (D, K, N // K + 2, H), names, inputs=(0,))
        self.out = weight(rngs, (N, H, D), (axes.HEADS, axes.HEAD_DIM, axes.EMBED), inputs=(0, 1))
        if config.qkv_bias:
            self.qkv_bias = bias(rngs, (K, N // K + 2, H), names[1:])
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(H, config.norm_eps, config.norm_offset, axes.HEAD_DIM) for _ in range(2)
            )
        self.config = config

    def __call__(
        self, x_TD: jax.Array, rope: RopeTable, attend: AttentionFn, cache: Any, layer: jax.Array
    ) -> tuple[jax.Array, Any]:
        config = self.config
        qkv_TKAH = self._project(x_TD)
        if config.qkv_bias:
            qkv_TKAH = qkv_TKAH + self.qkv_bias[...].astype(jnp.float32)
        turned_TKAH = rotate(self._normed(qkv_TKAH) if config.qk_norm else qkv_TKAH[:, :, :-1], rope)
        T, K, A, H = turned_TKAH.shape
        q_TNH = turned_TKAH[:, :, :-1].reshape(T, K * (A - 1), H)
        if config.query_scale is not None:  # attention divides by the root of H
            q_TNH = q_TNH * math.sqrt(H / config.query_scale)
        out_TNH, cache = attend(
            q_TNH,
            turned_TKAH[:, :, -1],
            qkv_TKAH[:, :, -1],
            cache,
            layer,
            window=_window(config.windows, layer),
            softcap=config.attention_softcap,
        )
        return product("TNH,NHD->TD", out_TNH, self.out), cache

    def _project(self, x_TD: jax.Array) -> jax.Array:
        """Queries, keys and values. The weight may lie as one matrix (`sharding.layouts`)."""
        if not is_merged(self.qkv, axes=4):
            return product("TD,DKAH->TKAH", x_TD, self.qkv)
        K, H = self.config.num_kv_heads, self.config.head_dim
        # or XLA would make one product for each head of it, and lay the weight for that
        qkv_TX = jax.lax.optimization_barrier(product("TD,DX->TX", x_TD, self.qkv))
        return qkv_TX.reshape(x_TD.shape[0], K, -1, H)

    def _normed(self, qkv_TKAH: jax.Array) -> jax.Array:
        """Queries and keys after their norms."""
        return jnp.concatenate([self.q_norm(qkv_TKAH[:, :, :-2]), self.k_norm(qkv_TKAH[:, :, -2:-1])], axis=2)


def _window(windows: tuple[int | None, ...], layer: jax.Array) -> Window:
    """A number where all layers have the same; else looked up, since one program serves all layers."""
    if len({*windows}) < 2:
        return windows[0] if windows else None
    return jnp.asarray([UNBOUNDED if window is None else window for window in windows], jnp.int32)[layer]


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    """Almost x where it is small, and never beyond the cap (Gemma 2, arXiv 2408.00118)."""
    return jnp.tanh(x / cap) * cap


def dense_attention(segments_T: jax.Array, positions_T: jax.Array) -> AttentionFn:
    """Attention over the tokens of this call alone: same segment, and not from the future. Keeps no cache."""
    same = segments_T[:, None] == segments_T[None, :]
    past_TU = same & (positions_T[:, None] >= positions_T[None, :])

    def attend(
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array,
        cache: Any,
        layer: jax.Array,
        *,
        window: Window = None,
        softcap: float | None = None,
    ) -> tuple[jax.Array, Any]:
        T, N, H = q_TNH.shape
        mask_TU = past_TU if window is None else past_TU & (positions_T[None, :] > positions_T[:, None] - window)
        K = k_TKH.shape[1]
        grouped = q_TNH.reshape(T, K, N // K, H)
        scores = jnp.einsum("TKRH,UKH->KRTU", grouped, k_TKH) / jnp.sqrt(jnp.float32(H))
        if softcap is not None:
            scores = soft_cap(scores, softcap)
        weights = jax.nn.softmax(jnp.where(mask_TU, scores, MASKED), axis=-1)
        return jnp.einsum("KRTU,UKH->TKRH", weights, v_TKH).reshape(T, N, H), cache

    return attend
