"""Weights packed for one CPU: products with them run in the kernel of `model.cpu_product`.

Packed once when they are loaded, in place of the arrays that they are made from. The layers' weights stay together: the
kernel is told which layer to read, so that nothing is sliced.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp

from model.bits import as_bits, as_numbers, meant_by

DTYPES = ("float32", "bfloat16", "int8")
"""Types of weights that the kernel reads."""
PACKAGE = Path(__file__).parent
SOURCES = tuple(PACKAGE.glob("cpu_*.py"))
"""What the kernel is compiled from."""
WIDTH = 32  # that of `model.cpu_product`, which takes a second to import


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """A weight, or those of all layers. Stands where a `jax.Array` could stand in a tree of parameters."""

    panels: jax.Array
    """float32 or int8[L, panels, I, WIDTH], or the bits of bfloat16[L, panels, I / 2, WIDTH, 2]: I inputs, the last
    panel filled with 0."""
    layer: jax.Array
    """int32[1]: the layer that products read."""
    outputs: tuple[int, ...] = field(metadata={"static": True})
    """Lengths of the output axes."""
    scale_LO: jax.Array | None = None
    """Of the outputs of int8."""

    def of_layer(self, layer: jax.Array) -> "Packed":
        """The same panels, of which products read another layer, an int32 scalar."""
        return replace(self, layer=layer[None])


@cache  # compiled code lives as long as its object
def register(dtype: str) -> object:
    """Make the kernel for weights of this type, one of `DTYPES`, known to XLA in this process."""
    from model.cpu_cache import kept_kernels  # Numba takes a second to import

    with kept_kernels(PACKAGE, SOURCES):
        from model import cpu_calls, cpu_product_handlers

        return cpu_calls.register(f"podstream_product_{dtype}", *cpu_product_handlers.ENTRIES[dtype])


def can_pack(weight: jax.Array | jax.ShapeDtypeStruct, inputs: Sequence[int]) -> bool:
    """Whether it is a matrix of a known type; two bfloat16 inputs share a word."""
    num_inputs = prod(weight.shape[axis] for axis in inputs)
    return bool(inputs) and str(weight.dtype) in DTYPES and (weight.dtype != jnp.bfloat16 or num_inputs % 2 == 0)


def pack(weight: jax.Array, inputs: Sequence[int], *, stacked: bool, scale: jax.Array | None = None) -> Packed:
    """`weight`, whose axes `inputs` products sum over; with `stacked` its first axis is that of layers.

    int8 comes with the `scale` of a `qwix.QArray`: one for each output.
    """
    lengths = tuple(size for axis, size in enumerate(weight.shape) if axis not in inputs)
    panels = _panels(weight, tuple(inputs), stacked=stacked)
    scale_LO = None if scale is None else scale.astype(jnp.float32).reshape(panels.shape[0], -1)
    return Packed(panels, jnp.zeros(1, jnp.int32), lengths[1:] if stacked else lengths, scale_LO)


@jax.jit(static_argnames=("inputs", "stacked"))
def _panels(weight: jax.Array, inputs: tuple[int, ...], *, stacked: bool) -> jax.Array:
    num_inputs = prod(weight.shape[axis] for axis in inputs)
    first = int(stacked)
    num_layers = weight.shape[0] if stacked else 1
    w_LIO = jnp.moveaxis(weight, inputs, range(first, first + len(inputs))).reshape(num_layers, num_inputs, -1)
    w_LIO = jnp.pad(w_LIO, ((0, 0), (0, 0), (0, -w_LIO.shape[2] % WIDTH)))
    if weight.dtype == jnp.bfloat16:
        return as_bits(w_LIO.reshape(num_layers, num_inputs // 2, 2, -1, WIDTH).transpose(0, 3, 1, 4, 2))
    return w_LIO.reshape(num_layers, num_inputs, -1, WIDTH).swapaxes(1, 2)


def packed_product(x: jax.Array, weight: Packed) -> jax.Array:
    """float32[R, *outputs] of x[R, *inputs]."""
    x_RI = x.reshape(x.shape[0], -1).astype(jnp.float32)
    result = jax.ShapeDtypeStruct((x.shape[0], prod(weight.outputs)), jnp.float32)
    call = jax.ffi.ffi_call(f"podstream_product_{meant_by(weight.panels.dtype)}", result)
    out_RO = call(x_RI, weight.panels, weight.layer)
    if weight.scale_LO is not None:
        out_RO = out_RO * weight.scale_LO[weight.layer[0]]
    return out_RO.reshape(x.shape[0], *weight.outputs)


def packed_rows(table: Packed, rows_T: jax.Array) -> jax.Array:
    """float32[T, I]: what the outputs `rows_T` are made with, as rows of a table of outputs x inputs."""
    panel_T, column_T = jnp.divmod(rows_T, WIDTH)
    found_TI = as_numbers(table.panels[0, panel_T, :, column_T])
    rows_TI = found_TI.reshape(rows_T.shape[0], -1).astype(jnp.float32)
    return rows_TI if table.scale_LO is None else rows_TI * table.scale_LO[0, rows_T, None]
