import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from model.config import ModelConfig
from model.convert import check_tensors, convert, convert_leaves, expected_shapes
from model.decoder import Decoder
from model.errors import CheckpointError, UnsupportedModel
from model.families.llama import FAMILY
from model.foreign import LazyTensor
from tests.model_files import LLAMA3, TIED, tiny_tensors

QUERY = "model.layers.{}.self_attn.q_proj.weight"


def _model(folder=TIED, **changes):
    """A golden model with some tensors replaced; None removes one."""
    model, tensors = tiny_tensors(folder)
    arrays = {name: array for name, array in (tensors | changes).items() if array is not None}
    lazy = {name: LazyTensor(array.shape, lambda array=array: array) for name, array in arrays.items()}
    return dataclasses.replace(model, tensors=lazy)


def _shapes(tree):
    return jax.tree.map(lambda array: array.shape, tree)


@pytest.mark.parametrize("folder", [TIED, LLAMA3])
def test_the_tree_is_the_decoders_own(folder):
    model = _model(folder)
    decoder = nnx.eval_shape(lambda: Decoder(model.config, nnx.Rngs(0)))
    decoders = {path: param.shape for path, param in nnx.to_flat_state(nnx.split(decoder)[1])}
    tree = expected_shapes(model.config, model.keys)
    ours = jax.tree.leaves_with_path(tree, is_leaf=lambda node: isinstance(node, tuple))
    assert {tuple(key.key for key in path): shape for path, shape in ours} == decoders
    assert _shapes(convert(model)) == tree


def test_every_number_is_where_it_belongs():
    """Written as indices, one by one, not as the reshapes under test."""
    model, tensors = tiny_tensors(LLAMA3)
    config, tree = model.config, convert(model)
    H = config.head_dim
    layers = tree["layers"]
    for layer in range(config.num_layers):
        query, out = tensors[QUERY.format(layer)], tensors[f"model.layers.{layer}.self_attn.o_proj.weight"]
        down = tensors[f"model.layers.{layer}.mlp.down_proj.weight"]
        for n, h, d in [(0, 0, 0), (1, 3, 7), (3, 15, 39)]:
            group, member = divmod(n, config.num_heads // config.num_kv_heads)
            assert layers["attention"]["qkv"][layer, d, group, member, h] == query[n * H + h, d]
            assert layers["attention"]["out"][layer, n, h, d] == out[d, n * H + h]
        for name, member in [("k_proj", -2), ("v_proj", -1)]:
            matrix = tensors[f"model.layers.{layer}.self_attn.{name}.weight"]
            assert layers["attention"]["qkv"][layer, 5, 1, member, 9] == matrix[H + 9, 5]
        for name, half in [("gate_proj", 0), ("up_proj", 1)]:
            matrix = tensors[f"model.layers.{layer}.mlp.{name}.weight"]
            assert layers["mlp"]["gate_up"][layer, 30, half, 70] == matrix[70, 30]
        assert layers["mlp"]["down"][layer, 70, 30] == down[30, 70]
        norm = tensors[f"model.layers.{layer}.post_attention_layernorm.weight"]
        np.testing.assert_array_equal(layers["mlp_norm"]["scale"][layer], norm)
    np.testing.assert_array_equal(tree["embed"]["embedding"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(tree["head"]["kernel"], tensors["lm_head.weight"].T)


def test_tied_models_have_no_head_even_if_the_file_has_one():
    model = _model(**{"lm_head.weight": np.ones((320, 40), np.float32)})
    assert "head" not in convert(model)


def test_harmless_tensors_are_ignored():
    check_tensors(_model(**{"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}))


def test_all_misfits_are_told_at_once():
    model = _model(
        **{
            QUERY.format(0): None,
            "model.norm.weight": np.ones(3, np.float32),
            "model.layers.1.self_attn.q_proj.bias": np.ones(64, np.float32),
            "model.layers.7.mlp.up_proj.weight": np.ones((80, 40), np.float32),
        }
    )
    with pytest.raises(CheckpointError) as caught:
        convert(model)
    assert str(caught.value) == (
        f"{TIED} does not fit its own config: tensor model.norm.weight has shape [3], expected [40]; tensor "
        "model.layers.0.self_attn.q_proj.weight is missing; tensor model.layers.1.self_attn.q_proj.bias is unexpected; "
        "and 1 more."
    )


def test_a_damaged_number_of_layers_costs_nothing():
    """Two thousand million layers must be refused by counting, not by listing their tensors."""
    model = _model()
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, num_layers=2**31))
    with pytest.raises(CheckpointError, match=r"says 2,147,483,648 layers, but it holds only \d+ tensors\."):
        convert(model)


def test_nothing_is_read_from_a_model_that_does_not_fit():
    model = _model(**{"model.norm.weight": None})
    unreadable = {name: LazyTensor(tensor.shape, lambda: pytest.fail("read")) for name, tensor in model.tensors.items()}
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        convert(dataclasses.replace(model, tensors=unreadable))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_numbers_that_are_none_are_refused_with_their_tensor(bad, dtype):
    _, tensors = tiny_tensors()
    spoiled = tensors[QUERY.format(1)].astype(dtype)
    spoiled[3, 4] = bad
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj\.weight holds 1 numbers of 2,560"):
        convert(_model(**{QUERY.format(1): spoiled}))


@pytest.mark.parametrize(
    ("dtype", "expected"), [(None, np.float32), ("float32", np.float32), ("bfloat16", ml_dtypes.bfloat16)]
)
def test_dtype_is_the_wanted_one(dtype, expected):
    _, tensors = tiny_tensors()
    tree = convert(_model(), dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {np.dtype(expected)}
    np.testing.assert_array_equal(tree["final_norm"]["scale"], tensors["model.norm.weight"].astype(expected))


def test_other_dtypes_are_refused():
    with pytest.raises(UnsupportedModel, match="'int8'"):
        convert(_model(), "int8")


def test_progress_ends_at_the_bytes_of_the_tree():
    reports = []
    total = sum(leaf.nbytes for _, leaf in convert_leaves(_model(), None, lambda done, of: reports.append((done, of))))
    assert reports[-1] == (total, total)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


def test_a_leaf_is_made_only_when_it_is_asked_for():
    reports = []
    leaves = convert_leaves(_model(), None, lambda done, _: reports.append(done))
    _, first = next(leaves)
    assert reports == [first.nbytes]


def test_shapes_of_the_tiny_config():
    shapes = expected_shapes(ModelConfig.tiny(tie_embeddings=False), FAMILY.keys)
    assert shapes["layers"]["attention"]["qkv"] == (2, 48, 2, 4, 16)
    assert shapes["head"]["kernel"] == (48, 160)
