"""Quantised weights: arrays of few bits with float scales, made and multiplied.

The arrays are qwix's `QArray`, and the type of their scales is the type that products compute in. Two of qwix's own
functions are not used. `qwix.einsum`: beside float activations it multiplies all weights by their scales before the
product, where one scale per output can be applied to the much smaller result. `qwix.quantize` for int4: it leaves one
of the 16 numbers unused, which costs more than longer groups do (see ARCHITECTURE.md).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import qwix

from model.quantization import WeightFormat


def quantize(weight: jax.Array, inputs: Sequence[int], form: WeightFormat, dtype: str) -> qwix.QArray:
    """`weight` in `form`, with scales of `dtype`; a scale spans all `inputs` axes, or a group of the last one."""
    weight = weight.astype(jnp.float32)
    if form.group is not None:
        return _quantize_groups(weight, inputs[-1], form, dtype)
    outputs = [axis for axis in range(weight.ndim) if axis not in inputs]
    return qwix.quantize(weight, jnp.dtype(form.dtype), channelwise_axes=outputs, scale_dtype=dtype)


def _quantize_groups(weight: jax.Array, axis: int, form: WeightFormat, dtype: str) -> qwix.QArray:
    """The extreme of each group becomes the lowest number, so that all of them are used; scales may be negative.

    The form of GGUF's Q4_0. Numbers are rounded after the scale is, so that its rounding adds no error.
    """
    low, high = -8, 7  # of int4, the only type in groups
    shape = (*weight.shape[:axis], -1, form.group, *weight.shape[axis + 1 :])
    groups = weight.reshape(shape)
    top, bottom = (pick(groups, axis=axis + 1, keepdims=True) for pick in (jnp.max, jnp.min))
    extreme = jnp.where(top > -bottom, top, bottom)
    scale = jnp.where(extreme == 0, 1.0, extreme / low).astype(dtype)
    numbers = jnp.clip(jnp.round(groups / scale.astype(jnp.float32)), low, high).astype(form.dtype)
    return qwix.QArray(numbers.reshape(weight.shape), jnp.squeeze(scale, axis + 1))


def scale_shape(shape: Sequence[int], inputs: Sequence[int], form: WeightFormat) -> tuple[int, ...]:
    """Shape of the scales that `quantize` makes; each axis is as long as the weight's, or counts groups, or is 1."""
    if form.group is None:
        return tuple(1 if axis in inputs else size for axis, size in enumerate(shape))
    return tuple(size // form.group if axis == inputs[-1] else size for axis, size in enumerate(shape))


def quantized_product(spec: str, x: jax.Array, weight: qwix.QArray) -> jax.Array:
    """`jnp.einsum(spec, x, weight)`, float32 out, computed in the type of the scales."""
    operands, out = spec.split("->")
    letters = operands.split(",")[1]
    x = x.astype(weight.dtype)
    if any(weight.scale.shape[axis] > 1 for axis, letter in enumerate(letters) if letter not in out):
        return jnp.einsum(spec, x, qwix.dequantize(weight), preferred_element_type=jnp.float32)
    product = jnp.einsum(spec, x, weight.qvalue.astype(weight.dtype), preferred_element_type=jnp.float32)
    kept = "".join(letter for letter in out if letter in letters)
    scale = jnp.einsum(f"{letters}->{kept}", weight.scale.astype(jnp.float32))  # drops the input axes of length 1
    return product * jnp.expand_dims(scale, [axis for axis, letter in enumerate(out) if letter not in letters])


def quantized_rows(table: qwix.QArray, rows: jax.Array) -> jax.Array:
    """Rows of a table with one scale each, float32."""
    return table.qvalue[rows].astype(jnp.float32) * table.scale[rows].astype(jnp.float32)
