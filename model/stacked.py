"""Weights of all layers that stay together while layers are scanned, because their products are told the layer.

Matrices of experts lie so on a TPU. XLA's own product with experts (`jax.lax.ragged_dot`) is a kernel there that wants
one layer's matrices by themselves, in its own type: each step would copy them all, and widen int8.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from model.packed import Packed
from model.tpu_experts import expert_product


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stacked:
    """Stands where an array could stand in a tree of parameters, as `model.packed.Packed` does."""

    matrices_LZCOI: jax.Array
    """Of C products that have the same inputs, each of outputs by inputs where there are several, else of inputs by
    outputs: the wider axis last, which is filled up to whole lanes."""
    scale_LZC1O: jax.Array | None
    """Of the outputs of int8."""
    layer: jax.Array | None = None
    """int32[1]: the layer that products read."""
    is_interpreted: bool = field(default=False, metadata={"static": True})
    """On what is no TPU."""

    @property
    def num_experts(self) -> int:
        """Those that are here."""
        return int(self.matrices_LZCOI.shape[1])

    @property
    def dtype(self) -> jnp.dtype:
        """That products are computed in."""
        return jnp.dtype(jnp.float32 if self.matrices_LZCOI.dtype == jnp.float32 else jnp.bfloat16)

    def of_layer(self, layer: jax.Array) -> "Stacked":
        return replace(self, layer=layer[None])

    def __call__(self, x_MI: jax.Array, counts_Z: jax.Array) -> jax.Array:
        """float32[M, C, O], or [M, O] where C is 1; rows are sorted by expert."""
        assert self.layer is not None, "products read one layer"
        results = [
            expert_product(
                x_MI, self.matrices_LZCOI, self.scale_LZC1O, self.layer, counts_Z, which, self.is_interpreted
            )
            for which in range(self.matrices_LZCOI.shape[2])
        ]
        return results[0] if len(results) == 1 else jnp.stack(results, axis=1)


_WHOLE = (Packed, Stacked)


def scan_layers(one: Callable[[Any, Any, jax.Array], Any], carry: Any, states: Any, num_layers: int) -> Any:
    """`jax.lax.scan` of one(carry, parameters of a layer, its number) -> carry over stacked parameters. What products
    are told the layer of is not sliced."""
    leaves, treedef = jax.tree.flatten(states, is_leaf=lambda leaf: isinstance(leaf, _WHOLE))
    wholes = [leaf if isinstance(leaf, _WHOLE) else None for leaf in leaves]
    sliced = [None if isinstance(leaf, _WHOLE) else leaf for leaf in leaves]

    def step(carry: Any, inputs: Any) -> Any:
        slices, layer = inputs
        chosen = [
            whole.of_layer(layer) if whole is not None else part for whole, part in zip(wholes, slices, strict=True)
        ]
        return one(carry, jax.tree.unflatten(treedef, chosen), layer), None

    return jax.lax.scan(step, carry, (sliced, jnp.arange(num_layers, dtype=jnp.int32)))[0]
