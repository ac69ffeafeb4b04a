"""Quantises parameters one after another, so that beside the result there is never more than one float array.

What lies on a mesh is quantised there; what lies in this process's memory, layer by layer, without a copy of all of it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from model import axes
from model.config import ModelConfig
from model.quantization import Quantization, WeightFormat
from model.quantized import quantize
from model.tree import Names, Params, at, put
from sharding.params import ParamSpec, param_specs, weight_formats


def quantize_onto(
    abstract: Params, leaves: Iterable[tuple[Names, jax.Array]], config: ModelConfig, format_: Quantization
) -> Params:
    """The parameters that `abstract` describes (see `abstract_params`), from float arrays of any type on its mesh.

    Each is deleted before the next is asked for.
    """
    formats, specs = weight_formats(config, format_), param_specs(config)
    params: Params = {}
    for names, leaf in leaves:
        wanted = at(abstract, names)
        if (form := formats.get(names)) is None:
            put(params, names, leaf.astype(wanted.dtype))
        else:
            put(params, names, _on_mesh(leaf, specs[names], form, wanted))
            leaf.delete()
    return params


def quantize_leaves(
    leaves: Iterable[tuple[Names, NDArray[Any]]], config: ModelConfig, format_: Quantization | None
) -> Iterator[tuple[Names, NDArray[Any]]]:
    """The leaves of quantised parameters, from float arrays in memory; scales keep the type of their weights."""
    formats, specs = weight_formats(config, format_), param_specs(config)
    for names, leaf in leaves:
        if (form := formats.get(names)) is None:
            yield names, leaf
        else:
            for field, values in _in_memory(leaf, specs[names], form).items():
                yield (*names, field), values


def _fields(weight: jax.Array, inputs: tuple[int, ...], form: WeightFormat, dtype: str) -> Params:
    array = quantize(weight, inputs, form, dtype)
    return {"qvalue": array.qvalue, "scale": array.scale}


_STATIC = (1, 2, 3)
_fields_here = jax.jit(_fields, static_argnums=_STATIC)


def _on_mesh(leaf: jax.Array, spec: ParamSpec, form: WeightFormat, wanted: Params) -> Params:
    shardings = {field: array.sharding for field, array in wanted.items()}
    run = jax.jit(_fields, static_argnums=_STATIC, out_shardings=shardings)
    return jax.block_until_ready(run(leaf, spec.inputs, form, str(wanted["scale"].dtype)))


def _in_memory(leaf: NDArray[Any], spec: ParamSpec, form: WeightFormat) -> dict[str, NDArray[Any]]:
    dtype = str(leaf.dtype)
    if spec.logical_axes[0] != axes.LAYERS:
        return jax.tree.map(np.asarray, _fields_here(leaf, spec.inputs, form, dtype))
    inputs = tuple(axis - 1 for axis in spec.inputs)
    layers = [jax.tree.map(np.asarray, _fields_here(layer, inputs, form, dtype)) for layer in leaf]
    return {field: np.stack([layer[field] for layer in layers]) for field in layers[0]}
