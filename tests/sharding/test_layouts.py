"""Weights as a TPU reads them: the same numbers in another order of memory."""

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import dense_attention
from model.config import ModelConfig
from model.quantization import Quantization
from model.seams import ONE_DEVICE
from sharding.layouts import as_matrices, matrix_order, matrix_tiling
from sharding.mesh import make_mesh
from sharding.params import abstract_params, bind, init_params, param_specs
from sharding.rules import choose_rules
from sharding.seams import seams_over
from sharding.sizes import device_bytes
from sharding.spec import MeshSpec

MODEL = ModelConfig.tiny(tie_embeddings=False)


@pytest.mark.parametrize(
    ("shape", "inputs", "order"),
    [("LDCF", (1,), "LCDF"), ("LDX", (1,), "LDX"), ("LNHD", (1, 2), "LNHD"), ("LFD", (1,), "LFD"),
     ("VD", (1,), "VD"), ("DV", (0,), "DV")],
)  # fmt: skip
def test_the_last_two_axes_are_an_input_and_an_output(shape, inputs, order):
    assert "".join(shape[axis] for axis in matrix_order(len(shape), inputs)) == order


def test_a_tpu7x_is_told_its_tiles():
    assert matrix_tiling("TPU7x", 2) == ((16, 128), (2, 1))
    assert matrix_tiling("TPU7x", 1) is matrix_tiling("TPU v6 lite", 2) is None


def test_a_model_says_the_same_whatever_the_order():
    tokens, positions = jnp.arange(6), jnp.arange(6)

    def logits(params):
        decoder = bind(MODEL, params)
        return decoder(tokens, positions, dense_attention(jnp.zeros(6, jnp.int32), positions))[0]

    spec = MeshSpec(tensor=2)
    abstract = abstract_params(MODEL, make_mesh(spec), choose_rules(MODEL, spec), "float32")
    plain = init_params(MODEL)
    laid = as_matrices(jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), plain, abstract), MODEL)
    assert laid["layers"]["attention"]["qkv"].shape == (2, 48, 2 * 4 * 16)
    order = laid["layers"]["mlp"]["gate_up"].format.layout.major_to_minor
    assert order == (0, 2, 1, 3)
    np.testing.assert_allclose(jax.jit(logits)(plain), jax.jit(logits)(laid), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor=4", "expert=2,tensor=2", "data=2,expert=2", "stage=2,tensor=2"])
def test_experts_as_a_tpu_multiplies_with_them_say_the_same_on_any_mesh(mesh):
    """The kernel is interpreted."""
    model, spec = ModelConfig.tiny(num_experts=4, experts_per_token=2), MeshSpec.parse(mesh)
    plain, tokens, positions = init_params(model), jnp.arange(6), jnp.arange(6)
    device_mesh, rules = make_mesh(spec), choose_rules(model, spec)
    abstract = abstract_params(model, device_mesh, rules, "float32")

    @dataclass(frozen=True)
    class Dense:
        """Attention that stores nothing, in stages too."""

        def __call__(self, *arguments, **rest):
            return dense_attention(jnp.zeros(6, jnp.int32), positions)(*arguments, **rest)

        def only_if(self, is_live):
            return self

    jax.tree_util.register_static(Dense)

    def logits(params, seams):
        return bind(model, params, seams)(tokens, positions, Dense())[0]

    expected = jax.jit(lambda params: logits(params, ONE_DEVICE))(plain)
    laid = as_matrices(jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), plain, abstract), model)
    got = jax.jit(lambda params: logits(params, seams_over(device_mesh, ())))(laid)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_described_weights_are_split_as_before(quantize):
    spec = MeshSpec(tensor=2)
    quantization = quantize and Quantization.parse(quantize)
    abstract = abstract_params(MODEL, make_mesh(spec), choose_rules(MODEL, spec), "bfloat16", quantization)
    laid = as_matrices(abstract, MODEL)
    assert jax.tree.structure(laid) == jax.tree.structure(abstract)
    for before, after in zip(jax.tree.leaves(abstract), jax.tree.leaves(laid), strict=True):
        assert (prod(before.shape), before.dtype) == (prod(after.shape), after.dtype)
    assert device_bytes(laid) == device_bytes(abstract)
    ordered = [leaf for leaf in jax.tree.leaves(laid) if leaf.format.layout is not None]
    assert len(ordered) == sum(bool(one.inputs) for one in param_specs(MODEL).values())


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_matrices_of_experts_stay_together(quantize):
    model = ModelConfig.tiny(num_experts=4, experts_per_token=2)
    spec = MeshSpec(tensor=2)
    quantization = quantize and Quantization.parse(quantize)
    abstract = abstract_params(model, make_mesh(spec), choose_rules(model, spec), "bfloat16", quantization)
    mlp = as_matrices(abstract, model)["layers"]["mlp"]
    assert mlp["gate_up"].matrices_LZCOI.shape == (2, 4, 2, 96, 48)
    assert mlp["gate_up"].matrices_LZCOI.sharding.spec[3] == "tensor"
    assert mlp["down"].matrices_LZCOI.shape == (2, 4, 1, 96, 48)
    assert mlp["down"].matrices_LZCOI.sharding.spec[3] == "tensor"
    assert (mlp["down"].scale_LZC1O is None) == (quantize is None)
