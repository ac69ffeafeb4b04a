"""What the shapes of a checkpoint tell of its model, without a config."""

import pytest

from model.convert import leaves_of
from model.errors import CheckpointError, UnsupportedModel
from model.foreign import LazyTensor
from model.key_table import KeyTable
from model.layouts import arrange


def _never():
    raise AssertionError("shapes are enough")


def _lazy(shapes):
    return {name: LazyTensor(shape, _never) for name, shape in shapes.items()}


def gemma3_1b():
    """As Google publishes it."""
    layer = {
        "attn._key_norm.scale": (256,), "attn._query_norm.scale": (256,), "attn.attn_vec_einsum": (4, 256, 1152),
        "attn.kv_einsum": (2, 1, 1152, 256), "attn.q_einsum": (4, 1152, 256), "mlp.gating_einsum": (2, 6912, 1152),
        "mlp.linear": (6912, 1152), "post_attention_norm.scale": (1152,), "post_ffw_norm.scale": (1152,),
        "pre_attention_norm.scale": (1152,), "pre_ffw_norm.scale": (1152,),
    }  # fmt: skip
    shapes = {"embedder.input_embedding": (262_144, 1152), "final_norm.scale": (1152,)}
    shapes |= {f"layer_{index}.{name}": shape for index in range(26) for name, shape in layer.items()}
    return {f"transformer.{name}": shape for name, shape in shapes.items()}


def test_a_gemma_that_was_released_needs_no_config():
    found = arrange(_lazy(gemma3_1b() | {"transformer.vision_encoder.x": (3,)}), {}, KeyTable())
    config = found.config
    assert (config.num_layers, config.embed_dim, config.mlp_dim, config.vocab_size) == (26, 1152, 6912, 262_144)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_seq_len) == (4, 1, 256, 32_768)
    assert config.windows[:6] == (512,) * 5 + (None,) and config.tie_embeddings and config.qk_norm
    expected = {
        part.name for rows in leaves_of(config, found.keys).values() for key in rows for part in key.parts(config)
    }
    assert expected == set(found.tensors)


def test_one_of_other_sizes_needs_one():
    shapes = {name: shape for name, shape in gemma3_1b().items() if "layer_25" not in name}
    with pytest.raises(UnsupportedModel, match="model_type None is not supported"):
        arrange(_lazy(shapes), {}, KeyTable())


def test_the_optimizers_copies_are_not_taken_for_the_model():
    shapes = {name.removeprefix("transformer."): shape for name, shape in gemma3_1b().items()}
    state = {
        f"{where}.{name}": shape
        for where in ("opt_state.0.mu", "params", "ema.params")
        for name, shape in shapes.items()
    }
    assert arrange(_lazy(state | {"step": ()}), {}, KeyTable()).tensors.keys() == shapes.keys()


def test_where_there_are_several_models_it_must_be_said_which():
    shapes = {f"{where}.{name}": shape for where in ("a", "b") for name, shape in gemma3_1b().items()}
    with pytest.raises(CheckpointError, match=r"may lie at a\.transformer\. or b\.transformer\.; say with `prefix`"):
        arrange(_lazy(shapes), {}, KeyTable())
    assert arrange(_lazy(shapes), {}, KeyTable(prefix="b.transformer")).config.num_layers == 26


def test_maxtext_says_which_families_it_knows():
    shapes = {"params.token_embedder.embedding": (320, 32)}
    with pytest.raises(UnsupportedModel, match="MaxText's layout of 'gpt2' is not known; known: llama, mistral"):
        arrange(_lazy(shapes), {"model_type": "gpt2"}, KeyTable())
