"""Reads a model from a Hugging Face folder: config, tokenizer and lazily read safetensors."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - teaches NumPy, and so safetensors, the type bfloat16
import tokenizers
from safetensors import SafetensorError, safe_open

from model.card import GenerationDefaults, TextAssets
from model.errors import CheckpointError, UnsupportedModel
from model.families import read_config
from model.families.family import Family
from model.foreign import Array, ForeignModel, LazyTensor, Region, check_tokenizer
from model.hf_config import Json, text_fields

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")


def read_hf_folder(folder: Path) -> ForeignModel:
    """Open `folder` and check what can be checked without reading tensors.

    Raises CheckpointError for a missing, cut or corrupt file, UnsupportedModel for another architecture or tensor type.
    """
    config_json = read_json(folder / "config.json")
    generation_json = read_json(folder / "generation_config.json", required=False)
    family, config = read_config(config_json)
    tensors, dtypes = _tensors(folder, family)
    return ForeignModel(
        where=str(folder),
        config=config,
        keys=family.keys,
        text=text_assets(folder),
        generation=generation_defaults(config_json, generation_json),
        tensors=tensors,
        dtype="bfloat16" if dtypes == {"BF16"} else "float32",
    )


def read_json(path: Path, *, required: bool = True) -> Json:
    """A JSON object of a model folder; empty if it may be missing and is. Raises CheckpointError."""
    if not path.is_file():
        if required:
            raise CheckpointError(f"{path.parent} is not a Hugging Face model folder: it lacks {path.name}.")
        return {}
    try:
        value = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected a JSON object.")
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start:,}.") from error


def _tensors(folder: Path, family: Family) -> tuple[dict[str, LazyTensor], set[str]]:
    """The tensors of the text model by the names that they have where there is nothing else, and their types."""
    tensors: dict[str, LazyTensor] = {}
    dtypes: set[str] = set()
    for path in _shards(folder):
        for name, shape, dtype in _table(path):
            if family.ignored is not None and re.fullmatch(family.ignored, name):
                continue
            if dtype not in DTYPES:
                raise UnsupportedModel(
                    f"{path}: tensor {name} has type {dtype}, which is not supported; supported: {', '.join(DTYPES)}."
                )
            tensors[_text_name(name)] = _lazy(path, name, shape)
            dtypes.add(dtype)
    return tensors, dtypes


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
    names = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(names)} weight files in {INDEX} are missing: {', '.join(missing[:3])}."
        )
    return [folder / name for name in names]


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


def text_assets(folder: Path) -> TextAssets:
    """Tokenizer and chat template of a folder, with weights or without."""
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"{folder} lacks tokenizer.json; other tokenizer files are not read.")
    text, config = _text(folder / "tokenizer.json"), read_json(folder / "tokenizer_config.json", required=False)
    check_tokenizer(str(folder / "tokenizer.json"), text)
    bos = _token(config.get("bos_token"))
    return TextAssets(
        tokenizer_json=text,
        chat_template=_chat_template(folder, config),
        bos_token=bos,
        eos_token=_token(config.get("eos_token")),
        add_bos=_adds_bos(text, bos),
    )


def _token(value: Any) -> str | None:
    """A token is written as a string, or as an object with its `content`."""
    return value.get("content") if isinstance(value, dict) else value


def _adds_bos(tokenizer_json: str, bos: str | None) -> bool:
    """Asked of the tokenizer itself: the flag in tokenizer_config.json is not what decides."""
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    return bos is not None and tokenizer.encode("a", add_special_tokens=True).tokens[:1] == [bos]


def _chat_template(folder: Path, config: Json) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return _text(folder / "chat_template.jinja")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template


def generation_defaults(config: Json, generation: Json) -> GenerationDefaults:
    """Sampling numbers count only where the authors turn sampling on."""
    sampling = generation if generation.get("do_sample") else {}
    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys([*_ids(config), *_ids(text_fields(config)), *_ids(generation)])),
        temperature=sampling.get("temperature"),
        top_k=sampling.get("top_k"),
        top_p=sampling.get("top_p"),
    )


def _ids(config: Json) -> list[int]:
    value = config.get("eos_token_id")
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
