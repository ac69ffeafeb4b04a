"""Saves parameters with their ModelCard, and restores them straight onto a mesh. The one module that knows Orbax.

A checkpoint is an Orbax v1 folder (local or `gs://`) with the card in its custom metadata and a manifest written last.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from orbax.checkpoint import v1 as ocp

from model.card import ModelCard
from model.errors import CheckpointError
from model.tree import Names, Params, as_tree, names_of, put
from sharding.heap import freed_at_once
from sharding.manifest import NAME as MANIFEST_NAME
from sharding.manifest import Manifest
from sharding.sizes import array_bytes

PathLike = str | os.PathLike[str]
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

CARD_KEY = "podstream"
ORBAX_V1 = "orbax.checkpoint"  # a file at the root of what its v1 writes
# Small chunks keep the transient copy of a chunk small and let each host read only its own shards.
CHUNK_BYTES = 4 << 20
READ_SLACK_BYTES = 64 << 20
MAX_PROBLEMS = 3


def save(path: PathLike, params: Params, card: ModelCard) -> None:
    """Write a checkpoint at `path`, which must not exist. It can be loaded only once it is complete.

    Raises CheckpointError when something is there already.
    """
    save_leaves(path, ((names_of(key_path), leaf) for key_path, leaf in jax.tree.leaves_with_path(params)), card)


def save_leaves(path: PathLike, leaves: Iterable[tuple[Names, Any]], card: ModelCard) -> None:
    """`save` for parameters that come one after another: on a local disk each is let go before the next is asked for.

    Called by one process. Raises CheckpointError when something is at `path` already.
    """
    root = absolute(path)
    if root.exists():
        raise CheckpointError(f"{root} exists already; remove it or choose another path.")
    if "://" in os.fspath(root):
        _save_at_once(root, leaves, card)
    else:
        _save_one_by_one(root, leaves, card)


def _scratch_prefix(root: epath.Path) -> str:
    return f".{root.name}-unfinished-"


def _save_one_by_one(root: epath.Path, leaves: Iterable[tuple[Names, Any]], card: ModelCard) -> None:
    """In a folder that no killed process can have begun, then renamed: it appears complete or not at all."""
    with _writing(root):
        root.parent.mkdir(parents=True, exist_ok=True)
    written: Params = {}
    with tempfile.TemporaryDirectory(prefix=_scratch_prefix(root), dir=root.parent) as scratch:
        partial = epath.Path(scratch) / "partial"
        for names, leaf in leaves:
            with _writing(root):
                ocp.partial.save(partial, _nested(names, leaf), custom_metadata={CARD_KEY: card.to_json()})
            put(written, names, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        with _writing(root):
            ocp.partial.finalize(partial)
            _check_fit(partial, ocp.metadata(partial).metadata, written)
            Manifest.of(partial, card.source).write(partial)
            partial.rename(root)


def _save_at_once(root: epath.Path, leaves: Iterable[tuple[Names, Any]], card: ModelCard) -> None:
    """Object stores cannot rename a folder: the manifest, written last, is what makes the checkpoint complete."""
    params: Params = {}
    for names, leaf in leaves:
        put(params, names, leaf)
    with _writing(root):
        ocp.save(root, params, custom_metadata={CARD_KEY: card.to_json()})
        Manifest.of(root, card.source).write(root)


def remove_unfinished(path: PathLike) -> None:
    """Remove what killed saves to the local `path` left; only for who knows that nobody is saving there."""
    root = absolute(path)
    for rest in root.parent.glob(f"{_scratch_prefix(root)}*"):
        rest.rmtree()


def is_ours(root: epath.Path) -> bool:
    """Whether there is a checkpoint that podstream wrote, be it damaged."""
    if not (root / ORBAX_V1).exists():
        return False
    try:
        return CARD_KEY in (ocp.metadata(root).custom_metadata or {})
    except (ValueError, LookupError, TypeError, AttributeError, OSError):
        return (root / MANIFEST_NAME).exists()


def read_card(path: PathLike) -> ModelCard:
    """The card alone, with no array read.

    Raises CheckpointError when `path` is missing, incomplete, or not a podstream checkpoint.
    """
    return ModelCard.from_json(_metadata(absolute(path)).custom_metadata[CARD_KEY])


def saved_dtype(path: PathLike) -> str:
    """Type of the saved float numbers, which is one for all of them: `float32` or `bfloat16`."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(_metadata(absolute(path)).metadata)]
    return str(next(dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)))


def load(path: PathLike, abstract: Params, *, on_progress: Progress | None = None, verify: bool = True) -> Params:
    """Restore `abstract`, a nested dict of `jax.ShapeDtypeStruct` with shardings, cast to its dtypes.

    See `load_leaves`, whose leaves these are.
    """
    return as_tree(load_leaves(path, abstract, on_progress=on_progress, verify=verify))


def load_leaves(
    path: PathLike, abstract: Params, *, on_progress: Progress | None = None, verify: bool = True
) -> Iterator[tuple[Names, jax.Array]]:
    """The leaves of `load` one after another, the largest first, so that the peak stays near the weights themselves:
    what one leaf needs beside its result is paid while little else is there.

    `on_progress` counts bytes as restored. `verify` reads every file once more to check it against the manifest;
    several hosts share that out, and each finds only what is wrong with its part.

    Raises CheckpointError when the checkpoint is missing, incomplete, corrupt, or does not fit `abstract`.
    """
    root = absolute(path)
    if verify and (root / MANIFEST_NAME).exists():  # a missing one is told below, with its likely reason
        Manifest.read(root).verify(root, (jax.process_index(), jax.process_count()))
    _check_fit(root, _metadata(root).metadata, abstract)
    sizes = [(array_bytes(leaf.shape, leaf.dtype), key, leaf) for key, leaf in jax.tree.leaves_with_path(abstract)]
    total, done = sum(size for size, _, _ in sizes), 0
    for size, key_path, leaf in sorted(sizes, key=lambda item: item[0], reverse=True):
        yield names_of(key_path), _load_leaf(root, names_of(key_path), leaf)
        done += size
        if on_progress is not None:
            on_progress(done, total)


def absolute(path: PathLike) -> epath.Path:
    """Of a path or URL. Raises CheckpointError for a URL of a kind that is not read."""
    text = os.fspath(path).removeprefix("file://")
    try:
        return epath.Path(text if "://" in text else os.path.abspath(text))  # noqa: PTH100 - no symbolic links followed
    except KeyError as error:
        raise CheckpointError(f"{text} is a URL of a kind that is not read; gs:// and s3:// are.") from error


@contextmanager
def _writing(root: epath.Path) -> Iterator[None]:
    """Host arrays are not copied first: nobody changes them while they are written. A full disk is a ValueError."""
    context = ocp.Context()
    context.memory.deepcopy_host_arrays = False
    context.array.saving.storage_options.chunk_byte_size = CHUNK_BYTES
    try:
        with context:
            yield
    except (ValueError, OSError) as error:
        reason = str(error).rpartition(": ")[2]
        raise CheckpointError(f"{root} could not be written: {reason}.") from error


def _metadata(root: epath.Path) -> Any:
    """Shapes and card of a complete checkpoint of ours; each way of not being one has its own sentence."""
    if not root.exists():
        raise CheckpointError(f"there is no checkpoint at {root}.")
    try:
        metadata = ocp.metadata(root)
    except ocp.errors.InvalidLayoutError as error:
        raise CheckpointError(f"{root} is not a complete Orbax checkpoint: its commit marker is missing.") from error
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"the metadata of {root} is corrupt: {error}; import or copy it again.") from error
    if CARD_KEY not in (metadata.custom_metadata or {}):
        raise CheckpointError(f"{root} is an Orbax checkpoint without a podstream model card; import the model again.")
    if not (root / MANIFEST_NAME).exists():
        raise CheckpointError(f"{root} is incomplete: {MANIFEST_NAME} is missing; remove it and import again.")
    return metadata


def _check_fit(root: epath.Path, saved: Any, abstract: Params) -> None:
    """Compare all names, shapes and kinds of numbers at once, before anything is read."""
    found = {names_of(path): leaf for path, leaf in jax.tree.leaves_with_path(saved)}
    expected = {names_of(path): leaf for path, leaf in jax.tree.leaves_with_path(abstract)}
    problems = [*_misfits(found, expected)]
    if problems:
        more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        raise CheckpointError(f"{root} does not fit the model: {'; '.join(problems[:MAX_PROBLEMS])}{more}.")


def _misfits(found: dict[Names, Any], expected: dict[Names, Any]) -> Iterator[str]:
    for names, wanted in expected.items():
        name = ".".join(names)
        if (leaf := found.get(names)) is None:
            yield f"{name} is missing"
        elif tuple(leaf.shape) != tuple(wanted.shape):
            yield f"{name} has shape {list(leaf.shape)}, expected {list(wanted.shape)}"
        elif not (_is_float(leaf) and _is_float(wanted)) and leaf.dtype != wanted.dtype:
            yield f"{name} has type {leaf.dtype}, expected {wanted.dtype}"
    for names in found.keys() - expected.keys():
        yield f"{'.'.join(names)} is unexpected"


def _is_float(leaf: Any) -> bool:
    """Of floats any kind will do: they are cast."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _load_leaf(root: epath.Path, names: Names, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    with _load_context(leaf), freed_at_once():
        [array] = jax.tree.leaves(ocp.load(root, _nested(names, leaf)))
    loaded: jax.Array = array.block_until_ready()
    return loaded


def _load_context(leaf: jax.ShapeDtypeStruct) -> ocp.Context:
    """Bounds the bytes in flight; a bound below one leaf's bytes makes Orbax fail, so it is computed from the leaf.

    Saved numbers may be wider than wanted ones, hence four bytes for each.
    """
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    context.memory.read_concurrent_bytes = 4 * prod(leaf.shape) + READ_SLACK_BYTES
    return context


def _nested(names: Names, leaf: Any) -> Any:
    """A tree with this one leaf."""
    for name in reversed(names):
        leaf = {name: leaf}
    return leaf
