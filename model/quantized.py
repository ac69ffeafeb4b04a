"""Quantised weights: arrays of few bits with float scales, made and multiplied.

The arrays are qwix's `QArray`, and the type of their scales is the type that products compute in. What qwix offers
beyond is used for int8 only. `qwix.einsum`: beside float activations it multiplies all weights by their scales before
the product, where one scale per output can be applied to the much smaller result. `qwix.quantize` to int4: it leaves
one of the 16 numbers unused, which costs more than longer groups do (see ARCHITECTURE.md). And arrays of the type int4
cannot be arguments of programs that are compiled ahead (jax 0.10), so two of them share a byte, uint8: the first half
of a group lies in the low bits and the second in the high ones.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import qwix

from model.einsum import einsum
from model.quantization import WeightFormat

LOWEST = -8  # of int4


def quantize(weight: jax.Array, inputs: Sequence[int], form: WeightFormat, dtype: str) -> qwix.QArray:
    """`weight` in `form`, with scales of `dtype`; a scale spans all `inputs` axes, or a group of the last one."""
    weight = weight.astype(jnp.float32)
    if form.group is not None:
        return _quantize_groups(weight, inputs[-1], form.group, dtype)
    outputs = [axis for axis in range(weight.ndim) if axis not in inputs]
    return qwix.quantize(weight, jnp.int8, channelwise_axes=outputs, scale_dtype=dtype)


def _quantize_groups(weight: jax.Array, axis: int, group: int, dtype: str) -> qwix.QArray:
    """The extreme of each group becomes the lowest number, so that all of them are used; scales may be negative.

    The form of GGUF's Q4_0. Numbers are rounded after the scale is, so that its rounding adds no error; and the scale
    is rounded away from 0, so that what lies opposite the extreme is never cut by more than one of it.
    """
    groups = weight.reshape(*weight.shape[:axis], -1, group, *weight.shape[axis + 1 :])
    top, bottom = (pick(groups, axis=axis + 1, keepdims=True) for pick in (jnp.max, jnp.min))
    extreme = jnp.where(top > -bottom, top, bottom)
    exact = jnp.where(extreme == 0, 1.0, extreme / LOWEST)
    nearest = exact.astype(dtype)
    is_short = jnp.abs(nearest.astype(jnp.float32)) < jnp.abs(exact)
    scale = jnp.where(is_short, jnp.nextafter(nearest, jnp.sign(nearest) * jnp.inf), nearest)
    numbers = jnp.clip(jnp.round(groups / scale.astype(jnp.float32)), LOWEST, -LOWEST - 1).astype(jnp.int8)
    low, high = jnp.split(numbers, 2, axis=axis + 1)
    packed = jax.lax.bitcast_convert_type((low & 15) | (high << 4), jnp.uint8)
    return qwix.QArray(_merge(packed, axis), jnp.squeeze(scale, axis + 1), qtype=jnp.int4)


def _dequantize_groups(weight: qwix.QArray, axis: int) -> jax.Array:
    """What the numbers mean, in the type of the scales. `axis` is the one with groups."""
    num_groups, shape = weight.scale.shape[axis], weight.qvalue.shape
    packed = jax.lax.bitcast_convert_type(weight.qvalue, jnp.int8)
    packed = packed.reshape(*shape[:axis], num_groups, -1, *shape[axis + 1 :])
    numbers = jnp.concatenate([(packed << 4) >> 4, packed >> 4], axis=axis + 1)  # shifts to the right keep the sign
    return _merge(numbers.astype(weight.dtype) * jnp.expand_dims(weight.scale, axis + 1), axis)


def _merge(x: jax.Array, axis: int) -> jax.Array:
    """Axes `axis` and `axis` + 1 as one."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def stored_shapes(shape: Sequence[int], inputs: Sequence[int], form: WeightFormat) -> tuple[tuple[int, ...], ...]:
    """Shapes of the numbers and of the scales that `quantize` makes."""
    if form.group is None:
        return tuple(shape), tuple(1 if axis in inputs else size for axis, size in enumerate(shape))

    def divided(by: int) -> tuple[int, ...]:
        return tuple(size // by if axis == inputs[-1] else size for axis, size in enumerate(shape))

    return divided(2), divided(form.group)


def quantized_product(spec: str, x: jax.Array, weight: qwix.QArray, *, is_exact: bool = False) -> jax.Array:
    """`jnp.einsum(spec, x, weight)`, float32 out, computed in the type of the scales."""
    operands, out = spec.split("->")
    letters = operands.split(",")[1]
    x = x.astype(weight.dtype)
    if weight.qvalue.dtype == jnp.uint8:
        last_input = max(axis for axis, letter in enumerate(letters) if letter not in out)
        return einsum(spec, x, _dequantize_groups(weight, last_input), is_exact=is_exact)
    product = einsum(spec, x, weight.qvalue.astype(weight.dtype), is_exact=is_exact)
    kept = "".join(letter for letter in out if letter in letters)
    scale = jnp.einsum(f"{letters}->{kept}", weight.scale.astype(jnp.float32))  # drops the input axes of length 1
    return product * jnp.expand_dims(scale, [axis for axis, letter in enumerate(out) if letter not in letters])


def quantized_ragged_product(
    x_MD: jax.Array, weight: qwix.QArray, counts_Z: jax.Array, expert_M: jax.Array
) -> jax.Array:
    """`model.experts.ragged_product` for such a weight, computed in the type of the scales."""

    def ragged(matrices: jax.Array) -> jax.Array:
        flat = matrices.reshape(*matrices.shape[:2], -1)
        out_M = jax.lax.ragged_dot(x_MD.astype(weight.dtype), flat, counts_Z, preferred_element_type=jnp.float32)
        return out_M.reshape(-1, *matrices.shape[2:])

    if weight.qvalue.dtype == jnp.uint8:
        return ragged(_dequantize_groups(weight, axis=1))
    return ragged(weight.qvalue.astype(weight.dtype)) * weight.scale[:, 0].astype(jnp.float32)[expert_M]


def quantized_rows(table: qwix.QArray, rows: jax.Array, look_up: Callable[..., jax.Array]) -> jax.Array:
    """Rows of a table with one scale each, float32. `look_up` is a `model.seams.LookUpFn`."""
    return look_up(table.qvalue, rows).astype(jnp.float32) * look_up(table.scale, rows).astype(jnp.float32)
