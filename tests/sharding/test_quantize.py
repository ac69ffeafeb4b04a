"""Quantised at load, at import, and on a mesh: the same numbers, in the bytes that they should take."""

import dataclasses

import jax
import numpy as np
import pytest

from model.attention import dense_attention
from model.card import GenerationDefaults, ModelCard, TextAssets
from model.config import ModelConfig
from model.errors import CheckpointError, QuantizationError
from model.quantization import Quantization
from model.tree import names_of, put
from sharding import checkpoint
from sharding.mesh import make_mesh
from sharding.params import abstract_params, bind, init_params, weight_formats
from sharding.quantize import quantize_leaves, quantize_onto
from sharding.rules import choose_rules
from sharding.sizes import device_bytes, num_bytes
from sharding.spec import MeshSpec

# Inputs of 64, 32 (head_dim) and 96: on four devices each has a part of a group of `down`'s three.
CONFIG = ModelConfig.tiny(embed_dim=64, head_dim=32, num_heads=4, num_kv_heads=4, tie_embeddings=False)
CARD = ModelCard("tiny", CONFIG, TextAssets("{}"), GenerationDefaults(), "random", "int8")
FORMATS = ["int8", "int4:32"]


def abstract(spec=MeshSpec(), dtype="float32", quantization=None):  # noqa: B008 - frozen
    return abstract_params(CONFIG, make_mesh(spec), choose_rules(CONFIG, spec), dtype, quantization)


def flat(params):
    return [(names_of(path), leaf) for path, leaf in jax.tree.leaves_with_path(params)]


@pytest.fixture(scope="module")
def floats():
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: rng.standard_normal(a.shape, np.float32), abstract())


@pytest.fixture(scope="module", params=FORMATS)
def imported(request, floats):
    """(format, parameters quantised in memory)."""
    quantization = Quantization.parse(request.param)
    params = {}
    for names, leaf in quantize_leaves(flat(floats), CONFIG, quantization):
        put(params, names, leaf)
    return quantization, params


@pytest.mark.parametrize("spec", [MeshSpec(), MeshSpec(tensor=4)], ids=str)
def test_on_a_mesh_equals_in_memory(floats, imported, spec):
    quantization, params = imported
    wanted, place = abstract(spec, quantization=quantization), abstract(spec)
    leaves = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), floats, place)
    loaded = quantize_onto(wanted, flat(leaves), CONFIG, quantization)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), loaded) == jax.tree.map(
        lambda a: (a.shape, a.dtype, a.sharding), wanted
    )
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_saved_and_restored(tmp_path, imported):
    quantization, params = imported
    card = dataclasses.replace(CARD, quantization=str(quantization))
    checkpoint.save(tmp_path / "c", params, card)
    assert checkpoint.read_card(tmp_path / "c") == card
    assert checkpoint.saved_dtype(tmp_path / "c") == "float32"
    wanted = abstract(MeshSpec(tensor=4), quantization=quantization)
    jax.tree.map(np.testing.assert_array_equal, checkpoint.load(tmp_path / "c", wanted), params)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        checkpoint.load(tmp_path / "c", abstract())


def test_bytes_are_counted_as_they_lie(floats, imported):
    quantization, params = imported
    matrices = sum(x.size for names, x in flat(floats) if "norm" not in names[-2] and "kernel" not in names) - 160 * 64
    tables, norms = 2 * 160 * 64, 5 * 64
    scales = sum(x.size for names, x in flat(params) if names[-1] == "scale" and "norm" not in names[-2])
    weights = {"int8": matrices, "int4:32": matrices // 2}[str(quantization)]
    assert num_bytes(params) == weights + tables + 4 * (scales + norms)


def test_a_device_holds_its_share():
    for text in FORMATS:
        one, four = (abstract(MeshSpec(tensor=n), quantization=Quantization.parse(text)) for n in (1, 4))
        assert device_bytes(one) == num_bytes(one)
        assert num_bytes(four) / 4 < device_bytes(four) < num_bytes(four) / 3


def test_groups_that_do_not_fit_the_model_are_refused():
    with pytest.raises(QuantizationError, match=r"do not divide the \d+ inputs of layers\.\w+\.\w+"):
        abstract(quantization=Quantization.parse("int4:128"))


@pytest.mark.slow
def test_experts_are_quantised_and_what_is_small_stays_float():
    config = dataclasses.replace(
        CONFIG, num_layers=1, num_experts=4, experts_per_token=2, qkv_bias=True, qk_norm=True, sandwich_norms=True
    )
    int8 = Quantization.parse("int8")
    quantised = {".".join(names) for names in weight_formats(config, int8)}
    matrices = {"attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"}
    assert quantised == {"embed.embedding", "head.kernel", *(f"layers.{name}" for name in matrices)}
    floats, rounded = init_params(config), {}
    for names, leaf in quantize_leaves(((n, np.asarray(x)) for n, x in flat(floats)), config, int8):
        put(rounded, names, leaf)
    tokens = np.arange(12)
    attend = dense_attention(np.zeros(12, int), tokens)
    logits = jax.jit(lambda params: bind(config, params)(tokens, tokens, attend)[0])
    exact, near = (np.asarray(logits(params)) for params in (floats, rounded))
    assert 0 < np.abs(near - exact).max() < 0.1 * np.abs(exact).max()
