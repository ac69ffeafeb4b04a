"""Shapes, shardings and random values of a model's parameters, all from the one definition in `model.decoder`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from qwix import QArray

from model import axes
from model.config import ModelConfig
from model.decoder import Decoder
from model.packed import can_pack, pack
from model.quantization import Quantization, WeightFormat
from model.quantized import stored_shapes
from model.seams import ONE_DEVICE, Seams
from model.tree import Names, Params, at, put
from sharding.rules import ShardingRules


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter before it has numbers."""

    shape: tuple[int, ...]
    logical_axes: tuple[str, ...]
    inputs: tuple[int, ...]
    """Axes that products sum over; none for a norm."""

    @property
    def is_of_experts(self) -> bool:
        """Whether it is a matrix for each expert, of which a row needs one."""
        return axes.EXPERTS in self.logical_axes[:-1]


@cache  # one for all programs: to make it takes as long as to trace one
def abstract_decoder(config: ModelConfig, *, stacked: bool = True) -> Decoder:
    """The module without its numbers. Not to be changed."""
    return nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0), stacked=stacked))


def bind(config: ModelConfig, params: Params, seams: Seams = ONE_DEVICE) -> Decoder:
    """The module with these arrays (or tracers) as its parameters; their layers stacked or apart."""
    module, state = nnx.split(abstract_decoder(config, stacked=0 not in params["layers"]))
    bound = [(path, param.replace(_value_at(params, path))) for path, param in nnx.to_flat_state(state)]
    decoder = nnx.merge(module, nnx.from_flat_state(bound))
    decoder.seams = seams
    return decoder


def param_specs(config: ModelConfig) -> dict[Names, ParamSpec]:
    """Every parameter by its names."""
    _, state = nnx.split(abstract_decoder(config))
    return {names: _spec(param) for names, param in _flat(state)}


def weight_formats(config: ModelConfig, quantization: Quantization | None) -> Mapping[Names, WeightFormat]:
    """The parameters that are stored in fewer bits, and how. Raises QuantizationError when one does not fit."""
    if quantization is None:
        return {}
    specs = param_specs(config)
    chosen = {
        names: quantization.format_of(".".join(names), spec.shape, spec.logical_axes, spec.inputs)
        for names, spec in specs.items()
    }
    return {names: form for names, form in chosen.items() if form is not None}


def abstract_params(
    config: ModelConfig, mesh: Mesh, rules: ShardingRules, dtype: str, quantization: Quantization | None = None
) -> Params:
    """A ShapeDtypeStruct with its sharding for every parameter: what a restore needs to place the shards.

    `dtype` is the type of all float numbers. Raises QuantizationError when the format does not fit the model.
    """
    formats = weight_formats(config, quantization)

    def describe(spec: ParamSpec, shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rules.sharding(mesh, spec.logical_axes, shape))

    params: Params = {}
    for names, spec in param_specs(config).items():
        if (form := formats.get(names)) is None:
            put(params, names, describe(spec, spec.shape, dtype))
        else:
            numbers, scales = stored_shapes(spec.shape, spec.inputs, form)
            put(params, (*names, "qvalue"), describe(spec, numbers, form.dtype))
            put(params, (*names, "scale"), describe(spec, scales, dtype))
    return params


def init_params(config: ModelConfig, seed: int = 0) -> Params:
    """Random float32 parameters on the default device, for tests and benchmarks."""
    _, state = nnx.split(Decoder(config, nnx.Rngs(seed)))
    params: Params = {}
    for names, param in _flat(state):
        put(params, names, param[...])
    return params


def pack_onto(leaves: Iterable[tuple[Names, jax.Array]], config: ModelConfig) -> Params:
    """Parameters whose products run in the CPU's kernel (see `model.packed`), from float arrays on one CPU device.

    Each is deleted before the next is asked for.
    """
    specs = param_specs(config)
    params: Params = {}
    for names, leaf in leaves:
        spec = specs[names]
        if can_pack(leaf, spec.inputs) and not spec.is_of_experts:
            put(
                params,
                names,
                jax.block_until_ready(pack(leaf, spec.inputs, stacked=spec.logical_axes[0] == axes.LAYERS)),
            )
            leaf.delete()
        else:
            put(params, names, leaf)
    return params


def pack_int8(params: Params, config: ModelConfig) -> Params:
    """The same for parameters that are quantised to int8, which are taken out of `params`."""
    packed: Params = {}
    for names, spec in param_specs(config).items():
        found = at(params, names)
        put(params, names, None)
        if isinstance(found, dict) and not spec.is_of_experts:
            stacked = spec.logical_axes[0] == axes.LAYERS
            found = jax.block_until_ready(pack(found["qvalue"], spec.inputs, stacked=stacked, scale=found["scale"]))
        put(packed, names, found)
    return packed


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


def _flat(state: nnx.State[Any, Any]) -> list[tuple[Names, nnx.Param[jax.Array]]]:
    return [(tuple(map(str, names)), param) for names, param in nnx.to_flat_state(state)]


def _value_at(params: Params, path: tuple[Any, ...]) -> Any:
    found = at(params, path)
    return QArray(**found) if isinstance(found, dict) else found


def _spec(param: nnx.Param[jax.Array]) -> ParamSpec:
    names, inputs = param.get_metadata("logical_axes"), param.get_metadata("inputs")
    if len(names) < len(param.shape):  # the scan over layers added the leading axis
        names, inputs = (axes.LAYERS, *names), tuple(axis + 1 for axis in inputs)
    return ParamSpec(tuple(param.shape), names, inputs)
