"""Shapes, shardings and random values of a model's parameters, all from the one definition in `model.decoder`."""

from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from model import axes
from model.config import ModelConfig
from model.decoder import Decoder
from sharding.rules import ShardingRules

Params = dict[str, Any]
"""Nested dict of arrays or of `jax.ShapeDtypeStruct`; see `model.convert` for the names."""


def abstract_decoder(config: ModelConfig, *, stacked: bool = True) -> Decoder:
    """The module without its numbers."""
    return nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0), stacked=stacked))


def bind(config: ModelConfig, params: Params) -> Decoder:
    """The module with these arrays (or tracers) as its parameters; their layers stacked or apart."""
    module, state = nnx.split(abstract_decoder(config, stacked=0 not in params["layers"]))
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(module, state)


def abstract_params(config: ModelConfig, mesh: Mesh, rules: ShardingRules, dtype: str) -> Params:
    """A ShapeDtypeStruct with its sharding for every parameter: what a restore needs to place the shards."""
    _, state = nnx.split(abstract_decoder(config))

    def describe(param: nnx.Param[jax.Array]) -> jax.ShapeDtypeStruct:
        names = param.get_metadata("logical_axes")
        if len(names) < len(param.shape):  # the scan over layers added the leading axis
            names = (axes.LAYERS, *names)
        return jax.ShapeDtypeStruct(param.shape, dtype, sharding=rules.sharding(mesh, names))

    return _to_dict(nnx.to_flat_state(state), describe)


def init_params(config: ModelConfig, seed: int = 0) -> Params:
    """Random float32 parameters on the default device, for tests and benchmarks."""
    _, state = nnx.split(Decoder(config, nnx.Rngs(seed)))
    return _to_dict(nnx.to_flat_state(state), lambda param: param[...])


def take_layers_apart(params: Params) -> Params:
    """The same numbers with a dict of layers by number in place of stacked ones.

    For parameters on one CPU device, whose memory the new arrays share.
    """
    [device] = jax.tree.leaves(params)[0].devices()

    def layer(index: int) -> Params:
        # NumPy's view of a JAX array on a CPU, and JAX's of an aligned NumPy array, are the same memory.
        return jax.tree.map(
            lambda stacked: jax.device_put(np.asarray(stacked)[index], device, may_alias=True), params["layers"]
        )

    num_layers = jax.tree.leaves(params["layers"])[0].shape[0]
    return {**params, "layers": {index: layer(index) for index in range(num_layers)}}


def num_bytes(params: Params) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def _to_dict(flat: Any, convert: Any) -> Params:
    tree: Params = {}
    for path, param in flat:
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = convert(param)
    return tree
