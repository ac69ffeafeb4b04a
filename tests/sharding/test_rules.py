"""Meshes are parsed with care; every parameter gets a sharding that divides it."""

import jax
import pytest

from model import axes
from model.config import ModelConfig
from sharding.mesh import make_mesh
from sharding.params import abstract_params, init_params
from sharding.rules import ShardingRules, choose_rules
from sharding.sizes import num_bytes
from sharding.spec import MeshError, MeshSpec


@pytest.mark.parametrize(
    ("text", "shape"),
    [("", (1, 1)), ("tensor=4", (1, 4)), ("data=1,tensor=2", (1, 2)), (" tensor=2, data=1 ", (1, 2))],
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
        ("data=2", "start 2 replicas instead"),
    ],
)
def test_a_misspelt_mesh_is_refused_by_part(text, message):
    with pytest.raises(MeshError, match=message):
        MeshSpec.parse(text)


def test_too_few_devices_are_counted():
    with pytest.raises(MeshError, match=r"needs 64 devices, this process has 4 \(cpu\)"):
        make_mesh(MeshSpec(tensor=64))


def test_a_mesh_axis_is_used_once_per_array():
    rules = ShardingRules(dict.fromkeys(axes.ALL, "tensor"))
    with pytest.raises(AssertionError, match="mesh axis twice"):
        rules.partition((axes.HEADS, axes.MLP))


EVERYTHING = {"qkv_bias": True, "qk_norm": True, "sandwich_norms": True, "num_experts": 4, "experts_per_token": 2}


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
    assert choose_rules(config, MeshSpec(tensor=2)).mesh_axis[axes.HEADS] == "tensor"
    four = choose_rules(config, MeshSpec(tensor=4))
    assert four.mesh_axis[axes.HEADS] is four.mesh_axis[axes.KV_HEADS] is None
    assert four.notes == ("4 query heads over 2 KV heads cannot be split over tensor=4 and is replicated",)
