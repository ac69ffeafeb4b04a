"""Reads adapters as the PEFT library saves them: adapter_config.json and adapter_model.safetensors in a folder.

Whatever there is in them that would change answers and is not known here is refused by its name.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath
from safetensors import SafetensorError, deserialize

from model.adapters import Place, places_of
from model.config import ModelConfig
from model.convert import DTYPES
from model.errors import CheckpointError, UnsupportedModel
from model.fields import Fields
from model.foreign import Array
from model.keys import letter_sizes
from model.strangers import refuse_pipes, refuse_pointers
from model.tree import Params, put

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HEADER_BYTES = 16 << 20
MAX_CONFIG_BYTES = 1 << 20
_FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
_MODULE = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(?P<layer>\d+)\.(?P<part>.+)")

_READ = ("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "init_lora_weights")
_HARMLESS = (
    "alora_offset", "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
)  # fmt: skip
"""Say where the adapter comes from, how it was trained, or which tensors it has."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Ways to initialise an adapter that change the weights beside it, which are not in its files."""

Matrices = tuple[Array, Array]


class NoSuchAdapter(CheckpointError):
    """Nothing lies where an adapter was looked for."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in memory."""

    where: str
    rank: int
    scale: float
    """What a @ b is multiplied by."""
    matrices: Mapping[tuple[int, str], Matrices]
    """By layer and part of a weight (`Place.parts`): A [r, inputs] and B [outputs, r]."""


def read_adapter(path: epath.Path, config: ModelConfig, max_rank: int) -> Adapter:
    """The adapter in the folder `path`, a path or URL, for a model of this config (as it was saved).

    Raises NoSuchAdapter, CheckpointError when it is cut or does not fit the model, UnsupportedModel for what is not
    known; messages name the tensor or field.
    """
    if not path.exists():
        raise NoSuchAdapter(f"there is no adapter at {path}.")
    refuse_pipes(path)
    refuse_pointers(path)
    fields = _fields(path)
    rank, scale = _rank(path, fields, max_rank), _scale(path, fields)
    halves = dict(_halves(path, _tensors(path, config, rank), config, rank))
    _check_complete(path, halves, fields, config)
    matrices = {where: (halves[*where, "A"], halves[*where, "B"]) for where in {key[:2] for key in halves}}
    return Adapter(str(path), rank, scale, matrices)


def adapter_arrays(adapter: Adapter, config: ModelConfig, dtype: str, rank: int, kv_copies: int = 1) -> Params:
    """`a` and `b` of every place (`model.adapters`) as NumPy arrays of `dtype` with `rank` ranks, zeros where the
    adapter has fewer or nothing. `config` is the served one, whose KV heads are copied `kv_copies` times."""
    tree: Params = {}
    for place in places_of(config):
        a, b = (np.zeros(shape, DTYPES[dtype]) for shape in place.shapes(config, rank))
        a_LICY = a.reshape(*a.shape[:2], len(place.parts), rank)
        first = 0
        for index, part in enumerate(place.parts):
            pieces = slice(first, first := first + place.num_pieces(config, index))
            scale = adapter.scale * (_query_scale(config) if part == "self_attn.q_proj" else 1.0)
            copies = kv_copies if part in ("self_attn.k_proj", "self_attn.v_proj") else 1
            for layer in range(config.num_layers):
                if (found := adapter.matrices.get((layer, part))) is not None:
                    a_LICY[layer, :, index, : adapter.rank] = found[0].T
                    b[layer, pieces, : adapter.rank] = _pieces(found[1], place, index, config, copies) * scale
        put(tree, (*place.names, "a"), a)
        put(tree, (*place.names, "b"), b)
    return tree


def _pieces(matrix: Array, place: Place, part: int, config: ModelConfig, copies: int) -> Array:
    """B [outputs, r] as [pieces, r, outputs of a piece], float32."""
    matrix = matrix.astype(np.float32)
    if copies > 1:  # each KV head lies on several devices
        matrix = matrix.reshape(-1, config.head_dim, matrix.shape[1]).repeat(copies, axis=0)
    axis, sizes = place.axis or 0, list(letter_sizes(config, place.rest))
    sizes.insert(axis, place.num_pieces(config, part))
    pieces = np.moveaxis(matrix.reshape(*sizes, -1), (axis, -1), (0, 1))
    return pieces.reshape(*pieces.shape[:2], -1)


def _query_scale(config: ModelConfig) -> float:
    """1/sqrt(head_dim) where a training library folded it into the base's queries: then scores are divided by a number
    near 1, and not by one of the order of `head_dim`."""
    is_folded = config.query_scale is not None and config.query_scale < 2
    return 1 / math.sqrt(config.head_dim) if is_folded else 1.0


def _fields(path: epath.Path) -> dict[str, Any]:
    file = path / CONFIG
    if not file.exists():
        raise CheckpointError(f"{path} is no adapter: it lacks {CONFIG}.")
    if (size := file.stat().length) > MAX_CONFIG_BYTES:
        raise CheckpointError(f"{file} has {size:,} bytes, at most {MAX_CONFIG_BYTES:,} are read.")
    try:
        fields = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file} holds a {type(fields).__name__}, expected a JSON object.")
    if fields.get("peft_type") != "LORA":
        raise UnsupportedModel(f"{file}: peft_type is {fields.get('peft_type')!r}, only LORA is supported.")
    for name, value in fields.items():
        is_set = bool(value) and not (name == "bias" and value == "none")
        if is_set and name not in (*_READ, *_HARMLESS):
            raise UnsupportedModel(f"{file}: {name} is {json.dumps(value)[:100]}, which is not supported.")
    how = fields.get("init_lora_weights")
    if isinstance(how, str) and how.lower().startswith(_CHANGES_BASE):
        raise UnsupportedModel(
            f"{file}: init_lora_weights is {how!r}, which changes the weights of the model itself; save the adapter "
            "converted to plain LoRA."
        )
    return fields


def _rank(path: epath.Path, fields: Mapping[str, Any], max_rank: int) -> int:
    rank = fields.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise CheckpointError(f"{path / CONFIG}: r must be a positive whole number, got {rank!r}.")
    if rank > max_rank:
        raise CheckpointError(
            f"{path} is an adapter of rank {rank}, this server has room for {max_rank}; raise --max-lora-rank."
        )
    return rank


def _scale(path: epath.Path, fields: Mapping[str, Any]) -> float:
    read, rank = Fields(fields, str(path / CONFIG)), fields["r"]
    if (alpha := read.number("lora_alpha")) is None:
        raise read.wrong("lora_alpha", "a number")
    return float(alpha / math.sqrt(rank) if fields.get("use_rslora") else alpha / rank)


def _tensors(path: epath.Path, config: ModelConfig, rank: int) -> list[tuple[str, dict[str, Any]]]:
    """Read at once, since it is small: no more than what an adapter of this rank can have."""
    file = path / WEIGHTS
    if not file.exists():
        raise CheckpointError(f"{path} lacks {WEIGHTS}; other files of weights are not read.")
    shapes = (shape for place in places_of(config) for shape in place.shapes(config, rank))
    most = sum(map(prod, shapes)) * 4 + HEADER_BYTES
    if (size := file.stat().length) > most:
        raise CheckpointError(
            f"{file} has {size:,} bytes, more than the {most:,} that an adapter of rank {rank} for this model can have."
        )
    try:
        tensors: list[tuple[str, dict[str, Any]]] = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise CheckpointError(f"{file} ({size:,} bytes) is cut or corrupt: {error}.") from error
    return tensors


def _halves(
    path: epath.Path, tensors: list[tuple[str, dict[str, Any]]], config: ModelConfig, rank: int
) -> Iterator[tuple[tuple[int, str, str], Array]]:
    """Each tensor by its layer, its part of a weight, and A or B."""
    places = {part: (place, index) for place in places_of(config) for index, part in enumerate(place.parts)}
    for name, tensor in sorted(tensors, key=itemgetter(0)):  # files have them in any order
        named = _NAME.fullmatch(name)
        module = named and _MODULE.fullmatch(named["module"])
        if not named or not module or module["part"] not in places:
            known = ", ".join(part.rpartition(".")[2] for part in places)
            raise UnsupportedModel(f"{path}: tensor {name} is not of a kind that is adapted here, which are {known}.")
        layer, part, matrix = int(module["layer"]), module["part"], named["matrix"]
        if layer >= config.num_layers:
            raise CheckpointError(
                f"{path}: tensor {name} is of layer {layer}, but the model has {config.num_layers} layers."
            )
        yield (layer, part, matrix), _numbers(path, name, tensor, _shape(config, *places[part], rank, matrix))


def _shape(config: ModelConfig, place: Place, index: int, rank: int, matrix: str) -> tuple[int, int]:
    if matrix == "A":
        return rank, prod(letter_sizes(config, place.inputs))
    return prod(letter_sizes(config, place.rest)) * place.num_pieces(config, index), rank


def _numbers(path: epath.Path, name: str, tensor: dict[str, Any], shape: tuple[int, int]) -> Array:
    if (dtype := _FLOATS.get(tensor["dtype"])) is None:
        raise UnsupportedModel(
            f"{path}: tensor {name} has type {tensor['dtype']}, which is not supported; supported: "
            f"{', '.join(_FLOATS)}."
        )
    if tuple(tensor["shape"]) != shape:
        raise CheckpointError(f"{path}: tensor {name} has shape {tensor['shape']}, expected {list(shape)}.")
    numbers = np.frombuffer(tensor["data"], dtype).reshape(shape)
    if bad := numbers.size - int(np.count_nonzero(np.isfinite(numbers))):
        raise CheckpointError(f"{path}: tensor {name} holds {bad:,} numbers of {numbers.size:,} that are NaN or Inf.")
    return numbers


def _check_complete(
    path: epath.Path, halves: Mapping[tuple[int, str, str], Array], fields: Mapping[str, Any], config: ModelConfig
) -> None:
    """A missing half is found by the other one; a missing layer by the modules that the config names for all layers."""
    if not halves:
        raise CheckpointError(f"{path / WEIGHTS} holds no tensors.")
    wanted = {(layer, part) for layer, part, _ in halves}
    named = fields.get("target_modules")
    if isinstance(named, list) and not (fields.get("layers_to_transform") or fields.get("exclude_modules")):
        parts = (part for place in places_of(config) for part in place.parts)
        targets = [part for part in parts if part in named or part.rpartition(".")[2] in named]
        wanted |= {(layer, part) for layer in range(config.num_layers) for part in targets}
    for layer, part in sorted(wanted):
        for matrix in "AB":
            if (layer, part, matrix) not in halves:
                raise CheckpointError(f"{path}: tensor model.layers.{layer}.{part}.lora_{matrix} is missing.")
