"""Reads a model that podstream did not write straight onto a mesh: each host only the parts that its devices hold."""

from collections import Counter
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from model.convert import DTYPES, check_tensors, leaves_of, read_region
from model.errors import CheckpointError, UnsupportedModel
from model.fields import Fields, read_json
from model.foreign import ForeignModel, Region, choose_dtype
from model.gguf_file import read_gguf
from model.gguf_split import gguf_in
from model.hf_folder import CONFIG, GENERATION, INDEX, WEIGHTS, read_hf_folder
from model.hf_generation import generation_defaults
from model.hf_text import text_assets
from model.key_table import NAME, KeyTable
from model.keys import Key
from model.layouts import Arranged, arrange
from model.regions import whole
from model.strangers import refuse_part, refuse_pipes, refuse_pointers, why_no_model
from model.tied_head import with_its_head
from model.tree import Names, Params, at
from sharding.manifest import NAME as MANIFEST_NAME
from sharding.manifest import Manifest
from sharding.orbax_steps import find_pytree
from sharding.orbax_tree import OrbaxTree

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

TOKENIZER = "tokenizer.json"
FLOATS = ("float32", "bfloat16", "float16")


def open_foreign(path: epath.Path, model_files: str | None = None, keys: str | None = None) -> ForeignModel:
    """A GGUF file, or one of several or their folder, a Hugging Face folder, or an Orbax checkpoint of a training run.

    Of the last, `config.json` and tokenizer lie in the folder `model_files`, by default beside the checkpoint, and its
    key table, if it needs one, in the file `keys`, by default `podstream.toml` beside it. If it has a manifest, every
    file is checked against that.

    Raises CheckpointError or UnsupportedModel, before any number is read but those of a head that may be tied.
    """
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint at {path}.")
    refuse_pipes(path)
    refuse_pointers(path)
    if not path.is_dir():
        refuse_part(path)
        return read_gguf(Path(path))
    if (path / MANIFEST_NAME).exists():
        Manifest.read(path).verify(path, (jax.process_index(), jax.process_count()))
    if any((path / name).exists() for name in (WEIGHTS, INDEX)):
        return read_hf_folder(Path(path))
    root = find_pytree(path)
    if root is None and (file := gguf_in(Path(path))) is not None:
        return read_gguf(file)
    if root is None:
        raise CheckpointError(why_no_model(path))
    return _open_orbax(path, root, model_files, keys)


def _open_orbax(path: epath.Path, root: epath.Path, model_files: str | None, keys: str | None) -> ForeignModel:
    folders = _beside(path, root)
    files = Path(model_files) if model_files else _holding(TOKENIZER, folders)
    if files is None:
        raise CheckpointError(
            f"{path} has no {TOKENIZER} beside it; give the folder of its tokenizer and {CONFIG} with --model-files."
        )
    config_folder = files if (files / CONFIG).is_file() else _holding(CONFIG, folders)
    for folder in dict.fromkeys(each for each in (files, config_folder) if each is not None):
        refuse_pipes(folder)
        refuse_pointers(folder)
    table_folder = _holding(NAME, folders)
    table_path = Path(keys) if keys else table_folder and table_folder / NAME
    if table_path is not None:
        refuse_pipes(table_path)
    table = KeyTable.read(table_path) if table_path else KeyTable()
    config_json = read_json(config_folder / CONFIG) if config_folder else {}
    where = str((config_folder or files) / CONFIG)
    tree = OrbaxTree.open(root)
    arranged = arrange(tree.tensors, config_json, table, where)
    text, text_notes = text_assets(files, config_json.get("model_type"))
    dtype, dtype_notes = _dtype(path, tree, arranged)
    generation, notes = generation_defaults(
        Fields({**table.model, **config_json}, where),
        Fields.read(files / GENERATION),
        text,
        arranged.config.vocab_size,
    )
    model = ForeignModel(
        where=str(path),
        config=arranged.config,
        text=text,
        generation=generation,
        keys=arranged.keys,
        tensors=arranged.tensors,
        dtype=dtype,
        notes=(*dtype_notes, *text_notes, *notes),
        below=str(root)[len(str(path)) :].strip("/"),
    )
    check_tensors(model)
    return with_its_head(model)


def _beside(path: epath.Path, root: epath.Path) -> list[Path]:
    """Folders of this disk where files about the model may lie: from the pytree's own up to the one of `path`."""
    if "://" in str(path):
        return []
    folders, last = [Path(root)], Path(path).parent
    while folders[-1] != last and folders[-1] != folders[-1].parent:
        folders.append(folders[-1].parent)
    return folders


def _holding(name: str, folders: list[Path]) -> Path | None:
    return next((folder for folder in folders if (folder / name).is_file()), None)


def _dtype(path: epath.Path, tree: OrbaxTree, arranged: Arranged) -> tuple[str, tuple[str, ...]]:
    """What the numbers of the model are kept as, and notes."""
    prefixed = {id(tensor): name for name, tensor in tree.tensors.items()}
    kinds = {name: tree.dtypes[prefixed[id(tensor)]] for name, tensor in arranged.tensors.items()}
    for name, kind in kinds.items():
        if kind not in FLOATS:
            raise UnsupportedModel(
                f"{path}: tensor {name} has type {kind}, which is not supported; supported: {', '.join(FLOATS)}."
            )
    num_bytes = Counter[str]()
    for name, kind in kinds.items():
        num_bytes[kind] += prod(arranged.tensors[name].shape) * (4 if kind == "float32" else 2)
    return choose_dtype(num_bytes)


def foreign_leaves(
    model: ForeignModel, abstract: Params, on_progress: Progress | None = None
) -> Iterator[tuple[Names, jax.Array]]:
    """The leaves of the model one after another, the largest first, as `abstract` describes them: ShapeDtypeStructs
    with shardings. Beside them there is never more than one device's part of one leaf in memory, or one leaf of a file
    that cannot be read in parts.

    `on_progress` counts the bytes that this host needs. Raises CheckpointError for tensors that do not fit the config,
    are cut or corrupt, or hold NaN or Inf.
    """
    check_tensors(model)
    leaves = leaves_of(model.config, model.keys)
    parts = {names: _regions(at(abstract, names)) for names in leaves}
    sizes = {names: sum(_num_bytes(region, at(abstract, names).dtype) for region in parts[names]) for names in leaves}
    total, done = sum(sizes.values()), 0

    def report(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if on_progress is not None:
            on_progress(done, total)

    for names in sorted(leaves, key=lambda names: sizes[names], reverse=True):
        leaf, keys = at(abstract, names), leaves[names]
        dtype = DTYPES[str(leaf.dtype)]
        # What cannot be read in parts is read once for all devices of this host.
        everything = None if _has_parts(model, keys) else read_region(model, keys, whole(leaf.shape), dtype, report)
        shards = []
        for region, devices in parts[names].items():
            if everything is None:
                numbers = read_region(model, keys, _slices(region), dtype, report)
            else:
                numbers = everything[_slices(region)]
            shards += [jax.device_put(numbers, device) for device in devices]
        yield names, jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def _has_parts(model: ForeignModel, keys: list[Key]) -> bool:
    names = (part.name for key in keys for part in key.parts(model.config))
    return all(model.tensors[name].read_region is not None for name in names)


_Bounds = tuple[tuple[int, int], ...]


def _regions(leaf: jax.ShapeDtypeStruct) -> dict[_Bounds, list[jax.Device]]:
    """The different parts of a leaf that devices of this host hold, and which do."""
    assert leaf.sharding is not None
    regions: dict[_Bounds, list[jax.Device]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        slices = index if index is not None else ()
        bounds = tuple(part.indices(size)[:2] for part, size in zip(slices, leaf.shape, strict=True))
        regions.setdefault(bounds, []).append(device)
    return regions


def _slices(region: _Bounds) -> Region:
    return tuple(slice(start, stop) for start, stop in region)


def _num_bytes(region: _Bounds, dtype: Any) -> int:
    return prod(stop - start for start, stop in region) * np.dtype(dtype).itemsize
