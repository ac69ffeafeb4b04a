"""The building blocks of a decoder: linear maps, RMSNorm, rope and the gated MLP.

Activations travel in float32. A product casts its input to the weight's dtype and accumulates in float32: that is exact
for float32 weights, and for bfloat16 ones it is the form that runs fast on TPU and CPU alike.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from qwix import QArray

from model import axes
from model.adapters import Adapted, adapter_product
from model.config import LinearScaling, ModelConfig, RopeScaling
from model.einsum import einsum
from model.packed import Packed, packed_product
from model.quantized import quantized_product


def weight(
    rngs: nnx.Rngs, shape: Sequence[int], logical_axes: Sequence[str], inputs: Sequence[int]
) -> nnx.Param[jax.Array]:
    """A float32 parameter with normal init of variance 1/inputs.

    `logical_axes` names each dimension; `inputs` are the positions of those that products sum over, which is also what
    quantised weights share their scales along.
    """
    fan_in = math.prod(shape[axis] for axis in inputs)
    values = jax.random.normal(rngs.params(), tuple(shape), jnp.float32) / math.sqrt(fan_in)
    return nnx.Param(values, logical_axes=tuple(logical_axes), inputs=tuple(inputs))


def bias(rngs: nnx.Rngs, shape: Sequence[int], logical_axes: Sequence[str]) -> nnx.Param[jax.Array]:
    """A float32 parameter that is added; random, so that tests see it."""
    values = 0.1 * jax.random.normal(rngs.params(), tuple(shape), jnp.float32)
    return nnx.Param(values, logical_axes=tuple(logical_axes), inputs=())


def product(spec: str, x: jax.Array, weight: nnx.Param[jax.Array], *, is_exact: bool = False) -> jax.Array:
    """`jnp.einsum` of activations with a weight, float32 out. The weight may be quantised, or packed for a CPU, and
    adapted. For `is_exact` see `model.einsum`."""
    _check_inputs(spec, weight)
    w = weight.get_value()
    if isinstance(w, Adapted):
        out = _product(spec, x, w.weight, is_exact)
        return out + adapter_product(x, w).reshape(out.shape)
    return _product(spec, x, w, is_exact)


def _product(spec: str, x: jax.Array, w: Any, is_exact: bool) -> jax.Array:
    if isinstance(w, QArray):
        return quantized_product(spec, x, w, is_exact=is_exact)
    if isinstance(w, Packed):
        return packed_product(x, w)
    x = x.astype(w.dtype)
    if w.dtype == jnp.bfloat16 and x.shape[0] == 1:  # a CPU is eleven times faster with two rows than with one
        return einsum(spec, jnp.repeat(x, 2, axis=0), w, is_exact=is_exact)[:1]
    return einsum(spec, x, w, is_exact=is_exact)


def is_merged(weight: nnx.Param[jax.Array], axes: int) -> bool:
    """Whether a weight that is declared with so many axes lies as a matrix of inputs by all outputs."""
    value = weight.get_value()
    value = value.weight if isinstance(value, Adapted) else value
    return not isinstance(value, Packed) and (value.qvalue if isinstance(value, QArray) else value).ndim < axes


def _check_inputs(spec: str, weight: nnx.Param[jax.Array]) -> None:
    operands, out = spec.split("->")
    summed = tuple(axis for axis, letter in enumerate(operands.split(",")[1]) if letter not in out)
    assert summed == weight.get_metadata("inputs"), f"{spec} does not sum over the inputs of its weight"


class RMSNorm(nnx.Module):
    """Root-mean-square norm without mean or bias (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float, offset: float = 0.0, axis: str = axes.EMBED) -> None:
        """`offset` is what the stored scale lacks: Gemma's is 0 where it changes nothing."""
        self.scale = nnx.Param(jnp.full(width, 1 - offset, jnp.float32), logical_axes=(axis,), inputs=())
        self.eps = eps
        self.offset = offset

    def __call__(self, x_TD: jax.Array) -> jax.Array:
        """Over the last axis, whatever comes before it."""
        mean_square = jnp.mean(x_TD * x_TD, axis=-1, keepdims=True)
        scale = self.scale[...].astype(jnp.float32)
        return x_TD * jax.lax.rsqrt(mean_square + self.eps) * (scale + self.offset if self.offset else scale)


def activate(kind: str, x: jax.Array) -> jax.Array:
    """`kind` is one of `model.config.ACTIVATIONS`."""
    return jax.nn.silu(x) if kind == "silu" else jax.nn.gelu(x, approximate=True)


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202). Gate and up are one product."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, F = config.embed_dim, config.mlp_dim
        self.gate_up = weight(rngs, (D, 2, F), (axes.EMBED, axes.PAIR, axes.MLP), inputs=(0,))
        self.down = weight(rngs, (F, D), (axes.MLP, axes.EMBED), inputs=(0,))
        self.activation = config.activation

    def __call__(self, x_TD: jax.Array) -> jax.Array:
        both_TCF = product("TD,DCF->TCF", x_TD, self.gate_up)
        return product("TF,FD->TD", activate(self.activation, both_TCF[:, 0]) * both_TCF[:, 1], self.down)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | LinearScaling | None) -> jax.Array:
    """Radians per position of each rotated pair, float32[head_dim / 2] (Su et al. 2021, arXiv 2104.09864)."""
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    match scaling:
        case None:
            return frequencies
        case LinearScaling():
            return frequencies / scaling.factor
        case RopeScaling():
            return _stretch(frequencies, scaling)


def _stretch(frequencies: jax.Array, s: RopeScaling) -> jax.Array:
    """Llama 3: slow rotations are divided by `factor`, fast ones kept, those between are blended linearly."""
    turns = s.original_max_position * frequencies / (2 * math.pi)
    blend = jnp.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
    return frequencies / s.factor * (1 - blend) + frequencies * blend


RopeTable = tuple[jax.Array, jax.Array]
"""(cos, sin), each float32[T, 1, 1, head_dim / 2], made once per step for all layers."""


def rope_table(positions_T: jax.Array, frequencies: jax.Array) -> RopeTable:
    angles_T11H = (positions_T.astype(jnp.float32)[:, None] * frequencies)[:, None, None, :]
    return jnp.cos(angles_T11H), jnp.sin(angles_T11H)


def rotate(x_TKAH: jax.Array, table: RopeTable) -> jax.Array:
    """Rotate pairs (i, i + head_dim/2), the layout of Hugging Face checkpoints (GGUF pairs neighbours instead)."""
    cos, sin = table
    left, right = jnp.split(x_TKAH, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
