"""A model with repeated KV heads is the same one: a query head keeps its numbers, and the key and value it reads."""

import jax.numpy as jnp
import numpy as np
import pytest

from model.config import ModelConfig
from model.quantization import Quantization
from model.tree import at
from sharding.kv_heads import repeat_kv_heads, unrepeated
from sharding.mesh import make_mesh
from sharding.params import abstract_params, init_params
from sharding.rules import choose_rules
from sharding.spec import MeshSpec

CONFIG = ModelConfig.tiny(num_heads=8, num_kv_heads=2, qkv_bias=True)
SPEC = MeshSpec(tensor=4)
QKV = ("layers", "attention", "qkv")


@pytest.mark.parametrize("names", [QKV, ("layers", "attention", "qkv_bias")], ids=lambda names: names[-1])
def test_every_query_head_reads_what_it_read(names):
    mesh, rules = make_mesh(SPEC), choose_rules(CONFIG, SPEC)
    before = np.asarray(at(init_params(CONFIG), names))
    served = abstract_params(rules.served(CONFIG), mesh, rules, "float32")
    [(_, leaf)] = repeat_kv_heads([(names, jnp.asarray(before))], served, rules.kv_copies)
    assert (leaf.shape, leaf.sharding) == (at(served, names).shape, at(served, names).sharding)
    after = np.asarray(leaf)
    for head in range(8):
        (group, query), (new_group, new_query) = divmod(head, 4), divmod(head, 2)
        np.testing.assert_array_equal(after[..., new_group, new_query, :], before[..., group, query, :])
        np.testing.assert_array_equal(after[..., new_group, -2:, :], before[..., group, -2:, :])


@pytest.mark.parametrize("quantization", [None, Quantization.parse("int8")], ids=str)
def test_only_what_has_kv_heads_is_read_in_another_shape(quantization):
    """And each device reads a part of it."""
    mesh, rules = make_mesh(SPEC), choose_rules(CONFIG, SPEC)
    saved = abstract_params(CONFIG, mesh, rules, "float32", quantization)
    served = abstract_params(rules.served(CONFIG), mesh, rules, "float32", quantization)
    wanted = unrepeated(served, saved, mesh)
    numbers = QKV if quantization is None else (*QKV, "qvalue")
    assert at(wanted, numbers).shape == at(saved, numbers).shape
    assert at(wanted, numbers).sharding.shard_shape(at(wanted, numbers).shape) == (2, 12, 2, 6, 16)
    assert at(wanted, ("layers", "attention", "out")) == at(served, ("layers", "attention", "out"))
