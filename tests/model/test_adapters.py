"""What adapters add is what merging them into the weights would change, for each token its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.adapters import NO_ADAPTER, Adapted, StepAdapters, adapter_product
from model.attention import dense_attention
from model.config import ModelConfig
from model.peft import adapter_arrays, read_adapter
from model.quantization import Quantization
from model.quantized import quantize
from model.tree import at, put
from sharding.adapters import abstract_adapters, write_adapter
from sharding.checkpoint import absolute
from sharding.mesh import make_mesh
from sharding.params import bind, init_params, param_specs, take_layers_apart, weight_formats
from sharding.rules import choose_rules
from sharding.spec import MeshSpec
from tests.adapters import ALL, ATTENTION, merged, random_tensors, save_adapter

DENSE = ModelConfig.tiny(num_heads=8, num_kv_heads=4)
MOE = ModelConfig.tiny(qkv_bias=True, qk_norm=True, num_experts=4, experts_per_token=2)
MESH = make_mesh(MeshSpec())
RANK = 3
TOKENS = jnp.asarray([3, 1, 4, 1, 5, 9, 2, 6, 5])


@jax.jit(static_argnums=0)
def logits(config, params, adapters=None):
    positions = jnp.arange(len(TOKENS))
    decoder, attend = bind(config, params), dense_attention(jnp.zeros_like(positions), positions)
    return decoder.logits(decoder.hidden(TOKENS, positions, attend, None, adapters)[0])


def stacked(folder, config, *all_tensors):
    """All adapters as one step takes them."""
    abstract = abstract_adapters(config, MESH, choose_rules(config, MeshSpec()), "float32", len(all_tensors), RANK)
    layers = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), abstract)
    for place, tensors in enumerate(all_tensors):
        adapter = read_adapter(absolute(save_adapter(folder / str(place), tensors)), config, RANK)
        layers = write_adapter(layers, adapter_arrays(adapter, config, "float32", RANK), jnp.int32(place), RANK)
    return layers


@pytest.mark.slow
@pytest.mark.parametrize(("config", "targets"), [(DENSE, ALL), (MOE, ATTENTION)], ids=["dense", "experts"])
def test_adapted_equals_merged(tmp_path, config, targets):
    """Whether layers lie stacked or apart, and beside weights that int8 has rounded."""
    params = init_params(config)
    tensors = [random_tensors(config, seed=seed, rank=seed, targets=targets) for seed in (2, 3)]
    layers = stacked(tmp_path, config, *tensors)
    forms = [(params, params), (take_layers_apart(params), params), rounded(params, config)]
    for form, meant in forms if config is DENSE else forms[:1]:
        for number, expected in enumerate([meant, *(merged(meant, config, each) for each in tensors)]):
            adapters = StepAdapters(layers, jnp.full(len(TOKENS), number), RANK)
            np.testing.assert_allclose(logits(config, form, adapters), logits(config, expected), atol=1e-4)
    assert not np.allclose(logits(config, params), logits(config, merged(params, config, tensors[0])), atol=0.1)


def rounded(params, config):
    """As int8, and what that means."""
    specs, int8 = param_specs(config), Quantization.parse("int8")
    form, meant = (jax.tree.map(lambda leaf: leaf, params) for _ in range(2))
    for names, wanted in weight_formats(config, int8).items():
        array = quantize(at(params, names), specs[names].inputs, wanted, "float32")
        put(form, names, {"qvalue": array.qvalue, "scale": array.scale})
        put(meant, names, array.qvalue.astype(jnp.float32) * array.scale)
    return form, meant


def test_each_token_has_its_own_adapter_and_none_changes_nothing():
    """Whatever the other adapters hold, infinities included."""
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(5, 2, 2 * RANK)), rng.normal(size=(2, 2 * RANK, 4))
    a[..., RANK:] *= 1e38
    x = jnp.asarray(rng.normal(size=(6, 5)) * 1e3, jnp.float32)
    numbers = jnp.asarray([NO_ADAPTER, 1, 1, NO_ADAPTER, 1, NO_ADAPTER])
    adapted = Adapted(
        None, jnp.asarray(a.reshape(5, -1), jnp.float32), jnp.asarray(b, jnp.float32), numbers, RANK, (2, 4), 0
    )
    added = np.asarray(adapter_product(x, adapted))
    for token, number in enumerate(np.asarray(numbers)):
        own = [np.asarray(x[token]) @ a[:, c, :RANK] @ b[c, :RANK] for c in range(2)] if number else np.zeros((2, 4))
        np.testing.assert_allclose(added[token], own, rtol=1e-4)
