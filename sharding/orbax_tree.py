"""OrbaxTree: the arrays of an Orbax checkpoint that others wrote, found by name and read region by region.

A pytree is a folder with one zarr array per leaf, as files or inside one OCDBT database, written by Orbax's first
interface or by v1 (zarr3). `sharding.orbax_steps` finds that folder.
TensorStore reads them all: who asks for a part of an array gets the chunks that hold it and nothing else, and an
optimizer's arrays, which nobody asks for, are never read. TensorStore takes a chunk that is missing for zeros: so they
are counted.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import tensorstore as ts
from etils import epath

from model.errors import CheckpointError
from model.foreign import Array, LazyTensor, Region
from sharding.orbax_steps import ARRAY_FILES, TREE, is_ocdbt

CACHE_BYTES = 64 << 20  # keeps the database's index, and a chunk of which several devices hold parts
_AGGREGATE = "checkpoint"  # what the first versions of Orbax wrote beside arrays, before there was a tree of metadata
MAX_NAMED = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OrbaxTree:
    root: epath.Path
    """The folder of the pytree itself."""
    tensors: dict[str, LazyTensor]
    """By its names from the root, joined by dots; a `w` at the end, which says nothing, is left out."""
    dtypes: dict[str, str]

    @classmethod
    def open(cls, root: epath.Path) -> "OrbaxTree":
        """Read names, shapes and types of all arrays. Raises CheckpointError naming the array that is damaged."""
        store = _store(root)
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
        _check_chunks(root, opened, _count_chunks(keys, arrays))
        return cls._of(root, opened)

    @classmethod
    def _of(cls, root: epath.Path, opened: dict[str, Any]) -> "OrbaxTree":
        plain = {_plain(name): (name, array) for name, array in opened.items()}
        return cls(
            root,
            {plain_name: _lazy(root, name, array) for plain_name, (name, array) in plain.items()},
            {plain_name: array.dtype.name for plain_name, (_, array) in plain.items()},
        )


def _url(root: epath.Path) -> str:
    text = str(root)
    return f"{text}/" if "://" in text else f"file://{text}/"


def _store(root: epath.Path) -> Any:
    return {"driver": "ocdbt", "base": _url(root)} if is_ocdbt(root) else _url(root)


def _spec(root: epath.Path, name: str, kind: str) -> dict[str, Any]:
    store = {"driver": "ocdbt", "base": _url(root), "path": f"{name}/"} if is_ocdbt(root) else f"{_url(root)}{name}/"
    return {"driver": kind, "kvstore": store, "recheck_cached_data": False}


def _arrays(keys: list[str]) -> Iterator[tuple[str, str]]:
    for key in keys:
        for ending, kind in ARRAY_FILES.items():
            if key.endswith(ending):
                yield key.removesuffix(ending), kind


def _count_chunks(keys: list[str], arrays: dict[str, str]) -> dict[str, int]:
    """How many keys of each array hold numbers."""
    counts = dict.fromkeys(arrays, 0)
    for key in keys:
        if key.endswith(tuple(ARRAY_FILES)):
            continue
        name = key
        while name and name not in counts:
            name = name.rpartition("/")[0]
        if name:
            counts[name] += 1
    return counts


def _chunks(array: Any) -> int:
    chunk = array.chunk_layout.write_chunk.shape or (1,) * array.rank
    return prod(-(-size // step) for size, step in zip(array.shape, chunk, strict=True))


def _check_chunks(root: epath.Path, opened: dict[str, Any], counts: dict[str, int]) -> None:
    """Raises CheckpointError naming the first array of which chunks are missing. Old versions of Orbax stored none for
    zeros: of what they wrote nobody can tell, so it is said."""
    missing = {
        name: (counts[name], total) for name, array in opened.items() if counts[name] != (total := _chunks(array))
    }
    if not missing:
        return
    if _omits_zeros(root):
        some = ", ".join(
            f"{name} ({total - count} of {total})" for name, (count, total) in [*missing.items()][:MAX_NAMED]
        )
        logger.warning(
            "%s: chunks of %d tensors are missing and read as zeros, as the version of Orbax that wrote them stores "
            "none for those: %s", root, len(missing), some,
        )  # fmt: skip
        return
    name, (count, total) = next(iter(missing.items()))
    where = "its database" if is_ocdbt(root) else "its folder"
    raise CheckpointError(f"{root}: tensor {name} has {count} of {total} chunks in {where}; copy it again.")


def _omits_zeros(root: epath.Path) -> bool:
    """Whether chunks of zeros are not stored: where the metadata, which one of Orbax wrote, does not say otherwise."""
    try:
        return not json.loads((root / TREE).read_text()).get("store_array_data_equal_to_fill_value", False)
    except FileNotFoundError:
        return (root / _AGGREGATE).is_file()
    except (ValueError, AttributeError, OSError) as error:
        raise CheckpointError(f"{root / TREE} is corrupt: {error}; copy the checkpoint again.") from error


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
