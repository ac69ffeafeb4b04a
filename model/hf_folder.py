"""Reads a model from a Hugging Face folder: its config, what stands beside it, and lazily read safetensors."""

import re
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path

import ml_dtypes  # noqa: F401 - teaches NumPy, and so safetensors, the type bfloat16
from safetensors import SafetensorError, safe_open

from model.errors import CheckpointError, UnsupportedModel
from model.families import read_config
from model.families.family import Family
from model.fields import Fields, read_json, shown
from model.foreign import Array, ForeignModel, LazyTensor, Region, choose_dtype
from model.hf_generation import generation_defaults
from model.hf_text import text_assets
from model.tied_head import with_its_head

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_NAME_BYTES = 255
CONFIG, GENERATION = "config.json", "generation_config.json"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_hf_folder(folder: Path) -> ForeignModel:
    """Open `folder` and check what can be checked without reading tensors, but for a head that may be tied.

    Raises CheckpointError for a missing, cut or corrupt file, UnsupportedModel for another architecture or tensor type.
    """
    config_path = folder / CONFIG
    config_json, generation_json = read_json(config_path), Fields.read(folder / GENERATION)
    family, config = read_config(config_json, str(config_path))
    tensors, num_bytes = _tensors(folder, family)
    (text, text_notes), (dtype, dtype_notes) = text_assets(folder, config_json["model_type"]), choose_dtype(num_bytes)
    generation, notes = generation_defaults(
        Fields(config_json, str(config_path)), generation_json, text, config.vocab_size
    )
    model = ForeignModel(
        where=str(folder),
        config=config,
        keys=family.keys,
        text=text,
        generation=generation,
        tensors=tensors,
        dtype=dtype,
        notes=(*dtype_notes, *text_notes, *notes),
    )
    return with_its_head(model)


def _tensors(folder: Path, family: Family) -> tuple[dict[str, LazyTensor], Counter[str]]:
    """The tensors of the text model by the names that they have where there is nothing else, and the bytes that are of
    each type."""
    tensors: dict[str, LazyTensor] = {}
    num_bytes = Counter[str]()
    for path in _shards(folder):
        for name, shape, dtype in _table(path):
            if family.ignored is not None and re.fullmatch(family.ignored, name):
                continue
            if dtype not in DTYPES:
                raise UnsupportedModel(
                    f"{path}: tensor {name} has type {dtype}, which is not supported; supported: {', '.join(DTYPES)}."
                )
            tensors[_text_name(name)] = _lazy(path, name, shape)
            num_bytes[DTYPES[dtype]] += prod(shape) * (4 if dtype == "F32" else 2)
    return tensors, num_bytes


def _text_name(name: str) -> str:
    """Beside other parts, the text model's tensors are `language_model.model.*` or, newer, `model.language_model.*`."""
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


def _shards(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise CheckpointError(f"{folder} holds neither {WEIGHTS} nor {INDEX}; other weight formats are not read.")
    names = _indexed(Fields(read_json(folder / INDEX), str(folder / INDEX)))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(names)} weight files in {INDEX} are missing: {', '.join(missing[:3])}."
        )
    return [folder / name for name in names]


def _indexed(index: Fields) -> list[str]:
    """The names of the files that an index speaks of, which lie beside it."""
    files = index.object("weight_map")
    names = {files.text(tensor) for tensor in files}
    for name in names:
        if not name or "/" in name or len(name.encode()) > MAX_NAME_BYTES:
            raise index.wrong("weight_map", f"names of files beside it, one is {shown(name)}")
    return sorted(map(str, names))


def _table(path: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - this object is no mapping
                entry = file.get_slice(name)
                yield name, tuple(entry.get_shape()), entry.get_dtype()
    except SafetensorError as error:
        raise CheckpointError(f"{path} ({path.stat().st_size:,} bytes) is cut or corrupt: {error}.") from error


def _lazy(path: Path, name: str, shape: tuple[int, ...]) -> LazyTensor:
    return LazyTensor(shape, lambda: _read(path, name), lambda region: _read(path, name, region))


def _read(path: Path, name: str, region: Region | None = None) -> Array:
    """The file is opened anew for each tensor: pages of an open mapped file would count as this process's memory."""
    try:
        with safe_open(path, framework="numpy") as file:
            array: Array = file.get_tensor(name) if region is None else file.get_slice(name)[region]
            return array
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}.") from error
