"""Where the matrices of adapters lie: each beside the weight that it adapts, split over the same axes.

Splitting a weight's inputs over devices splits `a`, whose small product is then added up over them; splitting its
outputs splits `b`. What is left is whole.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from model.adapters import places_of
from model.config import ModelConfig
from model.tree import Params, put
from sharding.rules import ShardingRules


def abstract_adapters(
    config: ModelConfig, mesh: Mesh, rules: ShardingRules, dtype: str, num_adapters: int, rank: int
) -> Params:
    """A ShapeDtypeStruct with its sharding for every array that so many adapters have. `config` is the served one."""
    tree: Params = {}
    for place in places_of(config):
        shapes = place.shapes(config, num_adapters * rank)
        for name, shape, logical_axes in zip("ab", shapes, place.logical_axes, strict=True):
            sharding = rules.sharding(mesh, logical_axes, shape)
            put(tree, (*place.names, name), jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))
    return tree


def put_adapter(arrays: Params, abstract: Params) -> Params:
    """One adapter's NumPy arrays on the mesh, where `abstract`, made for one, says."""
    return jax.tree.map(lambda array, form: jax.device_put(array, form.sharding), arrays, abstract)


def write_adapter(layers: Params, adapter: Params, place: jax.Array, rank: int) -> Params:
    """To be jitted with `layers` donated: the same with one adapter, made for `rank`, in its place, an int32 from 0."""
    return {
        module: {name: _write(whole, adapter[module][name], place * rank) for name, whole in weights.items()}
        for module, weights in layers.items()
    }


def _write(whole: Params, one: Params, first: jax.Array) -> Params:
    """The ranks of one adapter from `first` on."""
    a, num_ranks, rank = whole["a"], whole["b"].shape[2], one["b"].shape[2]
    for part, columns in enumerate(jnp.split(one["a"], one["a"].shape[-1] // rank, axis=-1)):
        a = jax.lax.dynamic_update_slice_in_dim(a, columns, part * num_ranks + first, axis=-1)
    return {"a": a, "b": jax.lax.dynamic_update_slice_in_dim(whole["b"], one["b"], first, axis=2)}
