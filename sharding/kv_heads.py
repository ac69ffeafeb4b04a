"""Copies of KV heads: where more devices share out the query heads than there are KV heads, each lies on several.

The model is then one with more KV heads, of which some are equal, and each is read by fewer query heads: nothing else
in the stack knows of it. Weights are repeated on their way to the mesh.
"""

from collections.abc import Iterable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.tree import Names, Params, at, put

_LEAVES = ("qkv", "qkv_bias")


def is_repeated(names: Names) -> bool:
    """Whether this leaf, or this field of a quantised one, has KV heads and their groups as its last axes but one."""
    return any(name in _LEAVES for name in names)


def unrepeated(abstract: Params, saved: Params, mesh: Mesh) -> Params:
    """`abstract` with those leaves as they are `saved`, each device reading a part of them."""
    result = jax.tree.map(lambda leaf: leaf, abstract)
    for path, leaf in jax.tree.leaves_with_path(saved):
        names = tuple(str(key.key) for key in path)
        if is_repeated(names):
            put(result, names, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_spread(leaf.shape, mesh)))
    return result


def _spread(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Over any axis that all devices can share out."""
    names = tuple(name for name, size in mesh.shape.items() if size > 1)
    axis = next((axis for axis, size in enumerate(shape) if size % mesh.size == 0 and size >= mesh.size), None)
    spec = [None] * len(shape) if axis is None else [*[None] * axis, names, *[None] * (len(shape) - axis - 1)]
    return NamedSharding(mesh, PartitionSpec(*spec))


def repeat_kv_heads(
    leaves: Iterable[tuple[Names, jax.Array]], abstract: Params, copies: int
) -> Iterator[tuple[Names, jax.Array]]:
    """The leaves with KV heads repeated, each put where `abstract` says."""
    for names, leaf in leaves:
        if is_repeated(names):
            run = jax.jit(partial(_repeat, copies=copies), out_shardings=at(abstract, names).sharding)
            yield names, jax.block_until_ready(run(leaf))
            leaf.delete()
        else:
            yield names, leaf


def _repeat(x_KAH: jax.Array, copies: int) -> jax.Array:
    """[.., K, A, H] to [.., K * copies, A', H]: the queries of a group are shared out, key and value repeated."""
    *lead, K, A, H = x_KAH.shape
    queries = x_KAH[..., :-2, :].reshape(*lead, K * copies, (A - 2) // copies, H)
    pairs = jnp.repeat(x_KAH[..., -2:, :], copies, axis=-3)
    return jnp.concatenate([queries, pairs], axis=-2)
