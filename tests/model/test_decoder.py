"""The decoder computes what Hugging Face transformers computes (golden files), and counts what it should."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import dense_attention
from model.config import ModelConfig
from model.convert import convert
from model.hf_folder import read_hf_folder
from sharding import checkpoint
from sharding.mesh import make_mesh
from sharding.params import abstract_params, bind, init_params, take_layers_apart
from sharding.rules import choose_rules
from sharding.spec import MeshSpec

GOLDEN = Path(__file__).parents[1] / "golden"
ATOL = 2e-4  # float32 sums in another order


@jax.jit
def logits_of(decoder, tokens, segments, positions):
    return decoder(tokens, positions, dense_attention(segments, positions))[0]


def dense_logits(decoder, tokens):
    positions = jnp.arange(len(tokens))
    return np.asarray(logits_of(decoder, jnp.asarray(tokens), jnp.zeros_like(positions), positions))


@pytest.mark.parametrize("name", ["tiny_tied", "tiny_llama3"])
def test_logits_equal_transformers(name):
    model = read_hf_folder(GOLDEN / name)
    decoder = bind(model.config, jax.tree.map(jnp.asarray, convert(model)))
    golden = np.load(GOLDEN / name / "logits.npz")
    for i in range(3):
        np.testing.assert_allclose(
            dense_logits(decoder, golden[f"prompt_{i}"]), golden[f"logits_{i}"], atol=ATOL, err_msg=f"prompt {i}"
        )


@pytest.mark.e2e
def test_logits_of_the_demo_model_equal_transformers(demo_model):
    card = checkpoint.read_card(demo_model)
    mesh, rules = make_mesh(MeshSpec()), choose_rules(card.config, MeshSpec())
    decoder = bind(card.config, checkpoint.load(demo_model, abstract_params(card.config, mesh, rules, "float32")))
    for case in json.loads((GOLDEN / "smollm2_logits.json").read_text()):
        last = dense_logits(decoder, case["ids"])[-1]
        np.testing.assert_allclose(last[case["top_ids"]], case["top_logits"], atol=5e-3)
        assert int(np.argmax(last)) == case["top_ids"][0]


def test_segments_of_one_call_do_not_see_each_other():
    config = ModelConfig.tiny()
    decoder = bind(config, init_params(config))
    first, second = [3, 1, 4, 1, 5], [9, 2, 6]
    positions = jnp.asarray([*range(5), *range(3)])
    together = logits_of(decoder, jnp.asarray(first + second), jnp.asarray([0] * 5 + [1] * 3), positions)
    apart = np.concatenate([dense_logits(decoder, first), dense_logits(decoder, second)])
    np.testing.assert_allclose(together, apart, atol=1e-5)


def test_the_layer_body_is_compiled_once_whatever_the_depth():
    """Scanned layers: program size must not grow with the number of layers."""
    sizes = []
    for layers in (2, 8):
        config = ModelConfig.tiny(num_layers=layers)
        decoder = bind(config, init_params(config))
        sizes.append(len(jax.jit(dense_logits_traced).lower(decoder, jnp.arange(4)).as_text()))
    assert sizes[1] < sizes[0] * 1.05


def test_layers_apart_equal_layers_stacked_and_share_their_memory():
    config = ModelConfig.tiny(num_layers=3)
    stacked = init_params(config)
    apart = take_layers_apart(stacked)
    np.testing.assert_array_equal(*(dense_logits(bind(config, params), [3, 1, 4, 1, 5]) for params in (stacked, apart)))
    whole, part = stacked["layers"]["mlp"]["down"], apart["layers"][1]["mlp"]["down"]
    assert part.unsafe_buffer_pointer() - whole.unsafe_buffer_pointer() == part.nbytes


def dense_logits_traced(decoder, tokens):
    positions = jnp.arange(tokens.shape[0])
    return decoder(tokens, positions, dense_attention(jnp.zeros_like(positions), positions))[0]
