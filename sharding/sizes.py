"""Bytes of arrays."""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp


def array_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of an array on a device; shape and type may be those of one shard."""
    return prod(shape) * int(jnp.dtype(dtype).itemsize)


def num_bytes(tree: Any) -> int:
    """Bytes of all arrays or ShapeDtypeStructs of a tree, each counted once however many devices hold it."""
    return sum(array_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))


def device_bytes(tree: Any) -> int:
    """Bytes that one device holds of these arrays or ShapeDtypeStructs."""
    return sum(array_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(tree))
