"""How weights lie in a TPU's memory: as matrices of inputs by outputs, so that products read them where they lie.

Left to itself a TPU lays an array in tiles over its last two axes. Of the MLP's gate and up, D x 2 x F, those are the
pair and F. No product reads that, so a program would copy all layers once per call. But the order of axes in memory is
free: pair, D, F is two matrices, and the array keeps its shape. Heads of queries, keys and values are many small
matrices in that order, which some programs would copy still; D x (all heads) is one.

A TPU7x multiplies numbers of two bytes in tiles of 16 x 128, but takes arguments in tiles of 8 x 128 unless it is told:
its programs would copy all layers, too.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from model import axes
from model.config import ModelConfig
from model.stacked import Stacked
from model.tree import Names, Params, at, names_of, put
from sharding.params import ParamSpec, param_specs

TPU7X = "TPU7x"  # as JAX calls its devices
SCALE = "scale"  # of a quantised weight
_HEADS = (axes.KV_HEADS, axes.GROUP, axes.HEAD_DIM)


def as_matrices(params: Params, config: ModelConfig) -> Params:
    """The same numbers, or ShapeDtypeStructs, as a TPU reads them; arrays are given up one after another."""
    specs = param_specs(config)
    laid = jax.tree_util.tree_map_with_path(lambda path, leaf: _laid(names_of(path), leaf, specs), params)
    for names, spec in specs.items():
        if spec.is_of_experts:
            put(laid, names, _stacked(at(laid, names)))
    return laid


def matrix_order(num_axes: int, inputs: Sequence[int]) -> tuple[int, ...]:
    """Axes from major to minor: what products do not sum over, the inputs, and the last output."""
    last = num_axes - 1
    outputs = [axis for axis in range(num_axes) if axis not in inputs]
    return (*outputs, *inputs) if last in inputs else (*outputs[:-1], *inputs, last)


def matrix_tiling(device_kind: str, itemsize: int) -> tuple[tuple[int, ...], ...] | None:
    """Tiles that products of numbers of so many bytes read; None where a device takes them without being told."""
    return ((16, 128), (2, 1)) if device_kind == TPU7X and itemsize == 2 else None


def _laid(names: Names, leaf: Any, specs: dict[Names, ParamSpec]) -> Any:
    spec = specs.get(names) or specs[names[:-1]]
    if not spec.inputs:
        return leaf
    shape, place = tuple(leaf.shape), leaf.sharding
    if spec.is_of_experts:
        return _told_apart(leaf, spec, is_scale=names[-1] == SCALE)
    if spec.logical_axes[-3:] == _HEADS:  # split over the first of them, so also as one axis
        shape = (*shape[:-3], prod(shape[-3:]))
        place = NamedSharding(place.mesh, PartitionSpec(*place.spec[:-2]))
    kind = next(iter(place.device_set)).device_kind
    is_whole = len(place.device_set) == 1  # of a part of an array XLA forgets what tiles it was told
    tiling = matrix_tiling(kind, leaf.dtype.itemsize) if is_whole and len(shape) > 2 else None
    layout = Layout(matrix_order(len(shape), spec.inputs), tiling)
    form = place if names[-1] == SCALE else Format(layout, place)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=form)
    return _moved(leaf, lambda x: x.reshape(shape), form)


def _told_apart(leaf: Any, spec: ParamSpec, *, is_scale: bool) -> Any:
    """Experts' matrices as `model.stacked` has them, or their scales, [L, Z, C, 1, O]: gate and up apart, or one."""
    has_pair, place = axes.PAIR in spec.logical_axes, leaf.sharding
    parts = (*place.spec, *[None] * (leaf.ndim - len(place.spec)))

    def move(x: Any) -> Any:
        if not has_pair:
            return jnp.expand_dims(x, 2)
        apart = jnp.moveaxis(x, 3, 2)
        return apart if is_scale else jnp.swapaxes(apart, 3, 4)

    shape = jax.eval_shape(move, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)).shape
    sides = ((parts[2], parts[4]) if is_scale else (parts[4], parts[2])) if has_pair else parts[2:]
    split = NamedSharding(place.mesh, PartitionSpec(*parts[:2], None, *sides))
    form = Format(Layout(tuple(range(len(shape)))), split)  # as a kernel takes them
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=form)
    return _moved(leaf, move, form)


def _stacked(found: Any) -> Stacked:
    """`found` is an array, or the fields of a quantised one."""
    matrices, scale = (found["qvalue"], found[SCALE]) if isinstance(found, dict) else (found, None)
    platform = next(iter(matrices.sharding.device_set)).platform
    return Stacked(matrices, scale, is_interpreted=platform != "tpu")


def _moved(leaf: Any, move: Any, form: Any) -> Any:
    return jax.block_until_ready(jax.jit(move, out_shardings=form, donate_argnums=0)(leaf))
