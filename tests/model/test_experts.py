"""A mixture of experts is a sum over each token's experts, however their weights are stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.config import ModelConfig
from model.experts import ExpertMLP
from model.quantization import WeightFormat
from model.quantized import quantize, quantized_product, quantized_ragged_product

CONFIG = ModelConfig.tiny(num_experts=5, experts_per_token=2, mlp_dim=24)


def by_loops(mlp, x_TD):
    """float64, one token and one expert after the other."""
    router, gate_up, down = (np.asarray(w[...], np.float64) for w in (mlp.router, mlp.gate_up, mlp.down))
    out = np.zeros_like(x_TD, np.float64)
    for t, x in enumerate(np.asarray(x_TD, np.float64)):
        shares = np.exp(x @ router) / np.exp(x @ router).sum()
        best = np.argsort(-shares)[: CONFIG.experts_per_token]
        for expert in best:
            gate, up = np.einsum("D,DCF->CF", x, gate_up[expert])
            share = shares[expert] / (shares[best].sum() if mlp.config.norm_expert_shares else 1)
            out[t] += share * ((gate / (1 + np.exp(-gate)) * up) @ down[expert])
    return out


@pytest.mark.parametrize("norm_shares", [True, False])
def test_each_token_gets_the_sum_of_its_experts(norm_shares):
    config = ModelConfig.tiny(num_experts=5, experts_per_token=2, mlp_dim=24, norm_expert_shares=norm_shares)
    mlp = ExpertMLP(config, nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal((9, config.embed_dim), np.float32)
    np.testing.assert_allclose(jax.jit(mlp)(jnp.asarray(x)), by_loops(mlp, x), atol=1e-5)


@pytest.mark.parametrize("form", [WeightFormat(), WeightFormat(32)], ids=["int8", "int4"])
def test_quantised_experts_are_those_that_the_numbers_mean(form):
    rng = np.random.default_rng(1)
    weight, x = rng.standard_normal((3, 64, 2, 5), np.float32), rng.standard_normal((7, 64), np.float32)
    counts, experts = jnp.asarray([2, 0, 5], jnp.int32), np.repeat([0, 2], [2, 5])
    array = jax.jit(quantize, static_argnums=(1, 2, 3))(weight, (1,), form, "float32")
    out = jax.jit(quantized_ragged_product)(x, array, counts, experts)
    product = jax.jit(quantized_product, static_argnums=0)
    for expert in (0, 2):
        one = jax.tree.map(lambda leaf, expert=expert: np.asarray(leaf)[expert], array)
        mine = experts == expert
        np.testing.assert_allclose(out[mine], product("TD,DCF->TCF", x, one)[mine], atol=1e-4)
