"""OrbaxTree: the arrays of an Orbax checkpoint that others wrote, found by name and read region by region.

A pytree is a folder with one zarr array per leaf, as files or inside one OCDBT database, written by Orbax's first
interface or by v1 (zarr3). Below a run's folder it lies in that of a step, and there in `items`, `default` or `state`.
TensorStore reads them all: who asks for a part of an array gets the chunks that hold it and nothing else, and an
optimizer's arrays, which nobody asks for, are never read.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import tensorstore as ts
from etils import epath

from model.errors import CheckpointError
from model.foreign import Array, LazyTensor, Region

MAX_DEPTH = 3
CACHE_BYTES = 64 << 20  # keeps the database's index, and a chunk of which several devices hold parts
_ITEMS = ("items", "default", "state", "params", "model", "pytree")
_OCDBT, _TREE, _CHECKPOINT = "manifest.ocdbt", "_METADATA", "_CHECKPOINT_METADATA"
_KINDS = {"/.zarray": "zarr", "/zarr.json": "zarr3"}
_STEP = re.compile(r"(?:\D*_)?(\d+)")
_UNFINISHED = ".orbax-checkpoint-tmp"


@dataclass(frozen=True, slots=True)
class OrbaxTree:
    root: epath.Path
    """The folder of the pytree itself."""
    tensors: dict[str, LazyTensor]
    """By its names from the root, joined by dots; a `w` at the end, which says nothing, is left out."""
    dtypes: dict[str, str]

    @classmethod
    def find(cls, path: epath.Path) -> epath.Path | None:
        """The folder of the pytree at or below `path`, of the newest step if there are several; None if there is none.

        Raises CheckpointError when it is not complete.
        """
        found = _find(path, MAX_DEPTH)
        if found is not None:
            for folder in (found, found.parent):
                _check_complete(folder)
        return found

    @classmethod
    def open(cls, root: epath.Path) -> "OrbaxTree":
        """Read names, shapes and types of all arrays. Raises CheckpointError naming the array that is damaged."""
        store, is_ocdbt = _store(root), _is_ocdbt(root)
        try:
            context = ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
            keys = sorted(key.decode() for key in ts.KvStore.open(store, context=context).result().list().result())
            arrays = dict(_arrays(keys))
            opening = {
                name: ts.open(_spec(root, name, kind), open=True, read=True, context=context)
                for name, kind in arrays.items()
            }
            opened = {name: future.result() for name, future in opening.items()}
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{root} is damaged: {_reason(error)}; copy it again.") from error
        if _omits_zeros(root):
            return cls._of(root, opened)
        counts = _count_chunks(keys, arrays)
        for name, array in opened.items():
            expected = _num_chunks(array)
            if counts[name] != expected:
                where = "its database" if is_ocdbt else "its folder"
                raise CheckpointError(
                    f"{root}: tensor {name} has {counts[name]} of {expected} chunks in {where}; copy it again."
                )
        return cls._of(root, opened)

    @classmethod
    def _of(cls, root: epath.Path, opened: dict[str, Any]) -> "OrbaxTree":
        plain = {_plain(name): (name, array) for name, array in opened.items()}
        return cls(
            root,
            {plain_name: _lazy(root, name, array) for plain_name, (name, array) in plain.items()},
            {plain_name: array.dtype.name for plain_name, (_, array) in plain.items()},
        )


def _find(path: epath.Path, depth: int) -> epath.Path | None:
    if not path.is_dir():
        return None
    if _is_ocdbt(path) or (path / _TREE).exists() or any(_is_array(child) for child in path.iterdir()):
        return path
    if depth == 0:
        return None
    children = {child.name: child for child in path.iterdir() if child.is_dir() and _UNFINISHED not in child.name}
    steps = sorted((int(match[1]), child) for name, child in children.items() if (match := _STEP.fullmatch(name)))
    likely = [children[name] for name in _ITEMS if name in children] + [child for _, child in reversed(steps)]
    return next((found for child in likely if (found := _find(child, depth - 1))), None)


def _is_array(path: epath.Path) -> bool:
    return path.is_dir() and any((path / kind[1:]).exists() for kind in _KINDS)


def _is_ocdbt(root: epath.Path) -> bool:
    return (root / _OCDBT).exists()


def _check_complete(folder: epath.Path) -> None:
    if _UNFINISHED in folder.name:
        raise CheckpointError(f"{folder} is not complete: the run that wrote it did not finish.")
    try:
        metadata = json.loads((folder / _CHECKPOINT).read_text())
    except FileNotFoundError:
        return
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{folder / _CHECKPOINT} is corrupt: {error}; copy the checkpoint again.") from error
    if isinstance(metadata, dict) and metadata.get("commit_timestamp_nsecs", 0) is None:
        raise CheckpointError(f"{folder} is not complete: {_CHECKPOINT} has no time of commit.")


def _url(root: epath.Path) -> str:
    text = str(root)
    return f"{text}/" if "://" in text else f"file://{text}/"


def _store(root: epath.Path) -> Any:
    return {"driver": "ocdbt", "base": _url(root)} if _is_ocdbt(root) else _url(root)


def _spec(root: epath.Path, name: str, kind: str) -> dict[str, Any]:
    store = {"driver": "ocdbt", "base": _url(root), "path": f"{name}/"} if _is_ocdbt(root) else f"{_url(root)}{name}/"
    return {"driver": kind, "kvstore": store, "recheck_cached_data": False}


def _arrays(keys: list[str]) -> Iterator[tuple[str, str]]:
    for key in keys:
        for ending, kind in _KINDS.items():
            if key.endswith(ending):
                yield key.removesuffix(ending), kind


def _count_chunks(keys: list[str], arrays: dict[str, str]) -> dict[str, int]:
    """How many keys of each array hold numbers."""
    counts = dict.fromkeys(arrays, 0)
    for key in keys:
        if key.endswith(tuple(_KINDS)):
            continue
        name = key
        while name and name not in counts:
            name = name.rpartition("/")[0]
        if name:
            counts[name] += 1
    return counts


def _num_chunks(array: Any) -> int:
    chunk = array.chunk_layout.write_chunk.shape or (1,) * array.rank
    return prod(-(-size // step) for size, step in zip(array.shape, chunk, strict=True))


def _omits_zeros(root: epath.Path) -> bool:
    """Whether chunks of zeros are not stored, as old versions of Orbax did; then one that is missing cannot be told."""
    try:
        return not json.loads((root / _TREE).read_text()).get("store_array_data_equal_to_fill_value", False)
    except FileNotFoundError:
        return True
    except (ValueError, AttributeError, OSError) as error:
        raise CheckpointError(f"{root / _TREE} is corrupt: {error}; copy the checkpoint again.") from error


def _plain(name: str) -> str:
    return name.replace("/", ".").removesuffix(".w")


def _lazy(root: epath.Path, name: str, array: Any) -> LazyTensor:
    def read(region: Region | None = None) -> Array:
        try:
            return np.asarray((array if region is None else array[region]).read().result())
        except (ValueError, OSError) as error:
            raise CheckpointError(
                f"{root}: tensor {_plain(name)} is cut or corrupt: {_reason(error)}; copy it again."
            ) from error

    chunk = array.chunk_layout.read_chunk.shape or ()
    is_one_chunk = all(step >= size for step, size in zip(chunk, array.shape, strict=False))
    is_small = 2 * prod(array.shape) * array.dtype.numpy_dtype.itemsize < CACHE_BYTES
    return LazyTensor(tuple(array.shape), read, read if is_small or not is_one_chunk else None)


def _reason(error: Exception) -> str:
    return str(error).split("[")[0].strip().rstrip(".")
