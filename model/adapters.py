"""Low-rank adapters beside one model (LoRA, Hu et al. 2021, arXiv 2106.09685): several, chosen token by token.

An adapter adds x @ a @ b to what a weight says of x. The matrices of all adapters lie side by side, so that a batch of
tokens of different adapters takes two products more per weight, whatever it is mixed from: the first gives each token a
few numbers per adapter, those that are not of its own adapter become 0, and the second adds up what is left. A token
without an adapter has only zeros there, which change nothing. No product is done per adapter and nothing is gathered,
so shapes depend on the number of places alone; with few adapters of low rank that is cheaper than to sort tokens.

In a tree, with the names of weights, `a` is [L, inputs, C * Y] and `b` [L, pieces, Y, outputs], with the axes of inputs
and outputs as one: arrays without short axes, which an accelerator would fill up. C are the parts of a weight that were
adapted apart: query, key and value are one weight here, three in Hugging Face's checkpoints. Pieces are slices of its
outputs that take the same part: each query of a KV group, its key, its value.
"""

from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from model import axes
from model.config import ModelConfig
from model.keys import letter_sizes
from model.tree import Names, Params

NO_ADAPTER = 0
"""What a token without an adapter has in the place of a number; adapters are counted from 1."""
_AXES = {
    "D": axes.EMBED, "N": axes.HEADS, "K": axes.KV_HEADS, "A": axes.GROUP, "F": axes.MLP, "C": axes.PAIR,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """A weight of every layer that can be adapted; letters are those of `model.axes`."""

    names: Names
    parts: tuple[str, ...]
    """What Hugging Face calls the matrices that it is made of."""
    inputs: str
    outputs: str
    pieces: str = ""
    """Of the outputs, the axis along which the parts lie; none where there is one part."""

    @property
    def rest(self) -> str:
        """The outputs of a piece."""
        return self.outputs.replace(self.pieces, "") if self.pieces else self.outputs

    @property
    def axis(self) -> int | None:
        """Where among the outputs the pieces are."""
        return self.outputs.index(self.pieces) if self.pieces else None

    def num_pieces(self, config: ModelConfig, part: int | None = None) -> int:
        """Of one part, or of all: the first part has all that the others leave."""
        total = letter_sizes(config, self.pieces)[0] if self.pieces else 1
        if part is None:
            return total
        return 1 if part else total - len(self.parts) + 1

    def shapes(self, config: ModelConfig, num_ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of `a` and `b`."""
        inputs, outputs = (prod(letter_sizes(config, letters)) for letters in (self.inputs, self.rest))
        a = config.num_layers, inputs, len(self.parts) * num_ranks
        return a, (config.num_layers, self.num_pieces(config), num_ranks, outputs)

    @property
    def logical_axes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of `a` and `b`. Of several axes in one, the first is the one that may be split."""
        pieces = _AXES[self.pieces or "C"]
        a = axes.LAYERS, _AXES[self.inputs[0]], axes.RANK
        return a, (axes.LAYERS, pieces, axes.RANK, _AXES[self.rest[0]])


_ATTENTION = (
    Place(("attention", "qkv"), ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "D", "KAH", "A"),
    Place(("attention", "out"), ("self_attn.o_proj",), "NH", "D"),
)
_MLP = (
    Place(("mlp", "gate_up"), ("mlp.gate_proj", "mlp.up_proj"), "D", "CF", "C"),
    Place(("mlp", "down"), ("mlp.down_proj",), "F", "D"),
)


def places_of(config: ModelConfig) -> tuple[Place, ...]:
    """Experts are not adapted: each would need adapters of its own, and its rows are sorted by expert already."""
    return _ATTENTION if config.num_experts else (*_ATTENTION, *_MLP)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepAdapters:
    """Adapters as one step takes them."""

    layers: Params
    """`a` and `b` of all places."""
    number_T: jax.Array
    """int32: each token's adapter, or NO_ADAPTER."""
    rank: int = field(metadata={"static": True})
    """Of each adapter; those of a lower one are filled up with zeros."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """One layer's weight, whatever its form, and what adapters add. Stands in the place of the weight."""

    weight: Any
    a: jax.Array
    b: jax.Array
    number_T: jax.Array
    rank: int = field(metadata={"static": True})
    outputs: tuple[int, ...] = field(metadata={"static": True})
    axis: int | None = field(metadata={"static": True})
    """See `Place.axis`."""


def adapt(layer: nnx.Module, config: ModelConfig, arrays: Params, number_T: jax.Array, rank: int) -> None:
    """Put Adapted in the place of the layer's weights. `arrays` are those of the one layer."""
    for place in (*_ATTENTION, *_MLP):
        module, name = place.names
        if (found := arrays.get(module, {}).get(name)) is not None:
            owner = getattr(layer, module)
            param = getattr(owner, name)
            outputs = letter_sizes(config, place.outputs)
            adapted = Adapted(param.get_value(), found["a"], found["b"], number_T, rank, outputs, place.axis)
            setattr(owner, name, param.replace(adapted))


def adapter_product(x: jax.Array, adapted: Adapted) -> jax.Array:
    """What adapters add to x[T, *inputs] @ weight, float32[T, *outputs]; 0 for tokens without one."""
    a, b = adapted.a, adapted.b
    T, X, Y = len(x), *b.shape[:2]
    h = jnp.matmul(x.reshape(T, -1).astype(a.dtype), a, preferred_element_type=jnp.float32)
    h = jax.lax.optimization_barrier(h)  # or XLA would make one product for each part, and copy `a` to lay it for that
    h_TCY, own_Y = h.reshape(T, -1, Y), NO_ADAPTER + 1 + jnp.arange(Y, dtype=jnp.int32) // adapted.rank
    # Chosen, not multiplied: another adapter may give infinity where 0 times it would be NaN.
    h_TCY = jnp.where(adapted.number_T[:, None, None] == own_Y, h_TCY, 0.0)
    if num_more := X - h_TCY.shape[1]:
        h_TCY = jnp.concatenate([jnp.repeat(h_TCY[:, :1], num_more + 1, axis=1), h_TCY[:, 1:]], axis=1)
    pieces = jnp.einsum("TCY,CYO->TCO", h_TCY.astype(b.dtype), b, preferred_element_type=jnp.float32)
    if adapted.axis is None:
        return pieces.reshape(T, *adapted.outputs)
    rest = [size for axis, size in enumerate(adapted.outputs) if axis != adapted.axis]
    return jnp.moveaxis(pieces.reshape(T, X, *rest), 1, adapted.axis + 1)
