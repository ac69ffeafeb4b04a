"""ExpertMLP: a mixture of experts (Shazeer et al. 2017, arXiv 1701.06538). A router sends each token to a few MLPs.

A token's rows are sorted by expert, so that the rows of one expert follow each other and each matrix is read once for
all of them (`jax.lax.ragged_dot`). Every token gets all of its experts: there is no capacity, and so no drop.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from qwix import QArray

from model import axes
from model.config import ModelConfig
from model.layers import activate, product, weight
from model.quantized import quantized_ragged_product
from model.seams import ExpertsFn
from model.stacked import Stacked


class ExpertMLP(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, F, Z = config.embed_dim, config.mlp_dim, config.num_experts
        self.router = weight(rngs, (D, Z), (axes.EMBED, axes.EXPERTS), inputs=(0,))
        self.gate_up = weight(rngs, (Z, D, 2, F), (axes.EXPERTS, axes.EMBED, axes.PAIR, axes.MLP), inputs=(1,))
        self.down = weight(rngs, (Z, F, D), (axes.EXPERTS, axes.MLP, axes.EMBED), inputs=(1,))
        self.config = config

    def __call__(self, x_TD: jax.Array, experts: ExpertsFn | None = None) -> jax.Array:
        for matrices in (self.gate_up, self.down):
            assert matrices.get_metadata("inputs") == (1,), "an expert's inputs are its first axis"
        experts_TE, shares_TE = self._route(x_TD)
        weights = self.gate_up.get_value(), self.down.get_value()
        return (experts or run_experts)(x_TD, experts_TE, shares_TE, *weights, self.config.activation)

    def _route(self, x_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Each token's experts, int32[T, E], and how much each of them counts."""
        weights_TZ = jax.nn.softmax(product("TD,DZ->TZ", x_TD, self.router, is_exact=True), axis=-1)
        shares_TE, experts_TE = jax.lax.top_k(weights_TZ, self.config.experts_per_token)
        if self.config.norm_expert_shares:
            shares_TE = shares_TE / jnp.sum(shares_TE, axis=-1, keepdims=True)
        return experts_TE, shares_TE


def run_experts(
    x_TD: jax.Array, experts_TE: jax.Array, shares_TE: jax.Array, gate_up: Any, down: Any, activation: str
) -> jax.Array:
    """What each token's experts say of it, float32[T, D], by their shares. `gate_up` is [Z, D, C, F] and `down`
    [Z, F, D], floats or quantised; an expert beyond the last one says nothing."""
    T, D = x_TD.shape
    num_picks, num_experts = experts_TE.shape[1], num_experts_of(down)
    order_M = jnp.argsort(experts_TE.reshape(-1), stable=True)  # M = T * E rows, one expert after the other
    expert_M = experts_TE.reshape(-1)[order_M]
    counts_Z = jnp.bincount(expert_M, length=num_experts).astype(jnp.int32)
    both_MCF = ragged_product(x_TD[order_M // num_picks], gate_up, counts_Z, expert_M)
    hidden_MF = activate(activation, both_MCF[:, 0]) * both_MCF[:, 1]
    out_MD = ragged_product(hidden_MF, down, counts_Z, expert_M)
    out_TED = out_MD[jnp.argsort(order_M)].reshape(T, num_picks, D)
    # What ragged_dot gives for rows of no expert is not said, so it is not multiplied by 0.
    return jnp.sum(jnp.where((experts_TE < num_experts)[..., None], out_TED * shares_TE[..., None], 0.0), axis=1)


def num_experts_of(w: Any) -> int:
    """Z of a weight as `run_experts` takes it."""
    return w.num_experts if isinstance(w, Stacked) else int(jax.tree.leaves(w)[0].shape[0])


def ragged_product(x_MD: jax.Array, w: Any, counts_Z: jax.Array, expert_M: jax.Array) -> jax.Array:
    """Row by row times the matrix of its expert, float32[M, ...]. Rows are sorted by expert, `counts_Z` for each.

    The weight is [Z, inputs, ...] and may be quantised, or stacked for a TPU.
    """
    if isinstance(w, Stacked):
        return w(x_MD, counts_Z)
    if isinstance(w, QArray):
        return quantized_ragged_product(x_MD, w, counts_Z, expert_M)
    out_M = jax.lax.ragged_dot(
        x_MD.astype(w.dtype), w.reshape(*w.shape[:2], -1), counts_Z, preferred_element_type=jnp.float32
    )
    return out_M.reshape(-1, *w.shape[2:])
