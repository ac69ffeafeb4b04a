"""Meshes are parsed with care; every parameter gets a sharding that divides it."""

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model import axes
from model.config import ModelConfig
from sharding.choose_mesh import choose_spec, nearest, problem
from sharding.mesh import make_mesh
from sharding.params import abstract_params, init_params
from sharding.rules import ShardingRules, choose_rules
from sharding.sizes import num_bytes
from sharding.spec import MeshError, MeshSpec


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("", (1, 1, 1, 1)),
        ("tensor=4", (1, 1, 1, 4)),
        ("data=1,tensor=2", (1, 1, 1, 2)),
        (" tensor=2, stage=3,expert=5,data=7 ", (7, 3, 5, 2)),
    ],
)
def test_parse(text, shape):
    spec = MeshSpec.parse(text)
    assert spec.shape == shape
    assert MeshSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor", "'tensor' is not understood"),
        ("tensor=0", "'tensor=0' is not understood"),
        ("model=2", "'model=2' is not understood"),
        ("tensor=2,tensor=2", "axis tensor is given twice"),
    ],
)
def test_a_misspelt_mesh_is_refused_by_part(text, message):
    with pytest.raises(MeshError, match=message):
        MeshSpec.parse(text)


def test_too_few_devices_are_counted():
    with pytest.raises(MeshError, match=r"needs 64 devices, this process has 4 \(cpu\)"):
        make_mesh(MeshSpec(tensor=64))


def test_a_mesh_axis_is_used_once_per_array():
    rules = ShardingRules(dict.fromkeys(axes.ALL, ("tensor",)))
    with pytest.raises(AssertionError, match="mesh axis twice"):
        rules.partition((axes.HEADS, axes.MLP))


EXPERTS = {"num_experts": 4, "experts_per_token": 2}
EVERYTHING = {"qkv_bias": True, "qk_norm": True, "sandwich_norms": True, **EXPERTS}


@pytest.mark.parametrize("tensor", [1, 2, 3, 4])
@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False}, EVERYTHING])
def test_every_parameter_is_split_evenly_or_whole(tensor, changes):
    config = ModelConfig.tiny(**changes)
    spec = MeshSpec(tensor=tensor)
    mesh, rules = make_mesh(spec), choose_rules(config, spec)
    abstract = abstract_params(config, mesh, rules, "float32")
    placed = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), init_params(config), abstract)
    assert jax.tree.map(lambda x: x.shape, placed) == jax.tree.map(lambda a: a.shape, abstract)
    on_one_device = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(placed))
    assert on_one_device == num_bytes(placed) if tensor == 1 else on_one_device < num_bytes(placed)


def test_heads_are_split_with_the_kv_heads_that_they_read():
    config = ModelConfig.tiny(num_heads=4, num_kv_heads=2)
    two, three, four = (choose_rules(config, MeshSpec(tensor=size)) for size in (2, 3, 4))
    assert two.mesh_axes[axes.HEADS] == two.mesh_axes[axes.KV_HEADS] == ("tensor",)
    assert three.mesh_axes[axes.HEADS] == three.mesh_axes[axes.KV_HEADS] == ()
    assert "4 query heads over 2 KV heads cannot be split over tensor=3 and is replicated" in three.notes
    assert (two.kv_copies, three.kv_copies, four.kv_copies) == (1, 1, 2)
    assert four.served(config).num_kv_heads == 4
    assert four.notes[0].startswith("each of 2 KV heads lies on 2 devices")


def test_experts_share_out_heads_and_vocabulary_too():
    config = ModelConfig.tiny(num_experts=4, experts_per_token=2, vocab_size=162)
    rules = choose_rules(config, MeshSpec(expert=2, tensor=2))
    assert rules.mesh_axes[axes.HEADS] == ("expert", "tensor")
    assert rules.mesh_axes[axes.VOCAB] == ("tensor",), "162 is no multiple of four"
    assert (rules.mesh_axes[axes.EXPERTS], rules.mesh_axes[axes.MLP]) == (("expert",), ("tensor",))


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        (
            "data=3",
            {},
            "mesh data=3: 64 slots cannot be shared out evenly over data=3; the nearest that works is data=2",
        ),
        (
            "stage=3,tensor=2",
            {},
            "2 layers cannot be shared out evenly over stage=3; the nearest that works is stage=2",
        ),
        ("expert=4", {}, "the model has no experts to lie on expert=4; the nearest that works is tensor=1."),
        (
            "expert=3",
            EXPERTS,
            "4 experts cannot be shared out evenly over expert=3; the nearest that works is expert=2",
        ),
        ("tensor=7", {}, "nothing of the model can be split over tensor=7; the nearest that works is tensor=6."),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_the_nearest_that_does(text, changes, words):
    with pytest.raises(MeshError) as caught:
        choose_spec(text, ModelConfig.tiny(**changes), 8, 64)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("num_devices", "changes", "expected"),
    [
        (1, {}, MeshSpec()),
        (4, {}, MeshSpec(tensor=4)),
        (8, {}, MeshSpec(data=2, tensor=4)),  # there are but 4 query heads
        (8, {"num_heads": 8}, MeshSpec(tensor=8)),
        (4, EXPERTS, MeshSpec(expert=4)),
        (8, {**EXPERTS, "num_heads": 8}, MeshSpec(expert=4, tensor=2)),
    ],
)
def test_auto_splits_what_can_be_split(num_devices, changes, expected):
    assert choose_spec("auto", ModelConfig.tiny(**changes), num_devices, 64) == expected


@given(
    shape=st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 4),
    num_heads=st.sampled_from([2, 4, 6, 8]),
    num_layers=st.integers(1, 6),
    num_experts=st.sampled_from([0, 2, 3, 8]),
)
@settings(max_examples=30, deadline=None)
def test_the_nearest_mesh_works_and_needs_no_more_devices(shape, num_heads, num_layers, num_experts):
    config = ModelConfig.tiny(
        num_heads=num_heads, num_layers=num_layers, num_experts=num_experts, experts_per_token=min(num_experts, 1)
    )
    spec = MeshSpec(*shape)
    near = nearest(config, spec, 64)
    assert problem(config, near, 64) is None and near.num_devices <= spec.num_devices
    assert (near == spec) == (problem(config, spec, 64) is None)
