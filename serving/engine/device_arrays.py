"""The arrays that compiled programs take and leave on the device."""

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from model.tree import Params
from serving.engine.executables import Executables

TreeT = TypeVar("TreeT")


@dataclass(frozen=True, slots=True)
class FlatWeights:
    """Weights as a call takes them: to flatten them each time would cost milliseconds."""

    leaves: tuple[jax.Array, ...]
    treedef: Any

    @classmethod
    def of(cls, weights: Params) -> "FlatWeights":
        leaves, treedef = jax.tree.flatten(weights)
        return cls(tuple(leaves), treedef)


def temporary_bytes(program: jax.stages.Compiled) -> int:
    """Bytes that one device needs while it runs the program, beyond arguments and what it writes in their place."""
    memory = program.memory_analysis()
    assert memory is not None, "every back end here analyses its programs"
    return int(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)


def compile_empty(state: TreeT, executables: Executables) -> jax.stages.Compiled:
    """A program without arguments that gives arrays like these, filled with zeros."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)

    def empty() -> TreeT:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    abstract = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), state)
    return executables.compiled(jax.jit(empty, out_shardings=shardings), (), "empty", str(abstract))


def renew(state: TreeT, empty: jax.stages.Compiled) -> TreeT:
    """What `empty` gives, in place of what a failed step has taken with it or left half written. Waits for it, and
    raises what the device raises."""
    for leaf in jax.tree.leaves(state):
        if not leaf.is_deleted():
            leaf.delete()  # first, since there may be no room for both
    return jax.block_until_ready(empty())
