"""The attention seam, the projections around it, and dense attention: the reference that all others must equal.

The model does not know where keys and values are kept. It calls an `AttentionFn`, which the caller makes: dense for a
whole prompt at once (here), paged for serving (`kv.paged_attention`).
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from model import axes
from model.config import ModelConfig
from model.layers import product, rotate, weight

MASKED = -1e30  # finite, so that a row with nothing to see gives zeros' average instead of NaN


class AttentionFn(Protocol):
    """Attend with causal masking; keys and values of this step are stored in `cache` on the way."""

    def __call__(
        self, q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, cache: Any, layer: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Returns (float32[T, N, H], the cache with this step's keys and values). `layer` is an int32 scalar."""
        ...


class Attention(nnx.Module):
    """Grouped-query attention with rope (Ainslie et al. 2023, arXiv 2305.13245).

    `qkv` is one weight, so one product: for each KV head the query heads that share it, then its key, then its value.
    Split over KV heads it needs no communication.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, N, K, H = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
        names = (axes.EMBED, axes.KV_HEADS, axes.GROUP, axes.HEAD_DIM)
        self.qkv = weight(rngs, (D, K, N // K + 2, H), names, inputs=(0,))
        self.out = weight(rngs, (N, H, D), (axes.HEADS, axes.HEAD_DIM, axes.EMBED), inputs=(0, 1))

    def __call__(
        self, x_TD: jax.Array, rope: tuple[jax.Array, jax.Array], attend: AttentionFn, cache: Any, layer: jax.Array
    ) -> tuple[jax.Array, Any]:
        qkv_TKAH = product("TD,DKAH->TKAH", x_TD, self.qkv)
        turned_TKAH = rotate(qkv_TKAH[:, :, :-1], rope)
        T, K, A, H = turned_TKAH.shape
        q_TNH = turned_TKAH[:, :, :-1].reshape(T, K * (A - 1), H)
        out_TNH, cache = attend(q_TNH, turned_TKAH[:, :, -1], qkv_TKAH[:, :, -1], cache, layer)
        return product("TNH,NHD->TD", out_TNH, self.out), cache


def dense_attention(segments_T: jax.Array, positions_T: jax.Array) -> AttentionFn:
    """Attention over the tokens of this call alone: same segment, and not from the future. Keeps no cache."""
    same = segments_T[:, None] == segments_T[None, :]
    mask_TU = same & (positions_T[:, None] >= positions_T[None, :])

    def attend(
        q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, cache: Any, layer: jax.Array
    ) -> tuple[jax.Array, Any]:
        T, N, H = q_TNH.shape
        K = k_TKH.shape[1]
        grouped = q_TNH.reshape(T, K, N // K, H)
        scores = jnp.einsum("TKRH,UKH->KRTU", grouped, k_TKH) / jnp.sqrt(jnp.float32(H))
        weights = jax.nn.softmax(jnp.where(mask_TU, scores, MASKED), axis=-1)
        return jnp.einsum("KRTU,UKH->TKRH", weights, v_TKH).reshape(T, N, H), cache

    return attend
