"""Trees of parameters as nested dicts, and their leaves one after another."""

from collections.abc import Iterable
from typing import Any

Params = dict[str, Any]
"""Nested dict of arrays, or of `jax.ShapeDtypeStruct` where it says abstract; see `model.convert` for the names. In the
place of a quantised array stands a dict with the fields of `qwix.QArray`: `qvalue` and `scale`."""
Names = tuple[str, ...]
"""Names from the root of a tree to a leaf."""


def names_of(key_path: tuple[Any, ...]) -> Names:
    """From the key path of `jax.tree.leaves_with_path`."""
    return tuple(str(key.key) for key in key_path)


def put(tree: Params, names: Names, value: Any) -> None:
    for name in names[:-1]:
        tree = tree.setdefault(name, {})
    tree[names[-1]] = value


def as_tree(leaves: Iterable[tuple[Names, Any]]) -> Params:
    tree: Params = {}
    for names, leaf in leaves:
        put(tree, names, leaf)
    return tree


def at(tree: Params, names: Names) -> Any:
    """The leaf or subtree at `names`."""
    found: Any = tree
    for name in names:
        found = found[name]
    return found
