"""Reads a model from a GGUF file: config, tokenizer and lazily de-quantised tensors.

GGUF keeps the rows of Llama's q and k interleaved per head (its rope turns neighbouring pairs); Hugging Face and
podstream turn the two halves of a head. `_unpermute` undoes that. Experts lie in one tensor, and are read one by one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Quant
from gguf import dequantize

from model.card import GenerationDefaults
from model.config import ModelConfig
from model.errors import CheckpointError, UnsupportedModel
from model.families import read_config
from model.foreign import Array, ForeignModel, LazyTensor
from model.gguf_config import config_json
from model.gguf_header import GgufHeader, GgufTensor
from model.gguf_names import ARCHITECTURES, EXPERT, MIXTRAL, Architecture
from model.gguf_rope import infer_rope_scaling
from model.gguf_split import read_whole_header
from model.gguf_tokenizer import read_text_assets

QUANTS = (
    Quant.F32, Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1, Quant.Q4_K,
    Quant.Q5_K, Quant.Q6_K,
)  # fmt: skip

ROPE_FACTORS = "rope_freqs.weight"
_EOS_FIELDS = ("eos", "eot", "eom")


def read_gguf(path: Path) -> ForeignModel:
    """Open `path`, a file or one of those of a split model, and check what can be checked without reading tensors.

    Raises CheckpointError for a cut or corrupt file or missing metadata, UnsupportedModel for another architecture,
    tokenizer or tensor type.
    """
    header = read_whole_header(path)
    name, architecture = _architecture(path, header)
    _check_types(path, header)
    family, config = read_config(
        config_json(path, header.fields, name, architecture, is_tied="output.weight" not in header.tensors),
        str(path),
    )
    if ROPE_FACTORS in header.tensors:
        factors = _read(header.tensors[ROPE_FACTORS])
        scaling = infer_rope_scaling(str(path), factors, config.head_dim, config.rope_theta)
        config = replace(config, rope_scaling=scaling)
    return ForeignModel(
        where=str(path),
        config=config,
        keys=family.keys,
        text=read_text_assets(path, header.fields),
        generation=_generation(path, header.fields, config),
        tensors=dict(_tensors(header, architecture, config)),
        dtype=_dtype(header),
    )


def _architecture(path: Path, header: GgufHeader) -> tuple[str, Architecture]:
    if (kind := header.fields.get("general.type", "model")) != "model":
        raise UnsupportedModel(f"{path} is no model but {kind!r}, which is made for one; give the file of the model.")
    name = str(header.fields.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{path}: architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}."
        )
    is_mixtral = name == "llama" and header.fields.get("llama.expert_count")
    return name, MIXTRAL if is_mixtral else ARCHITECTURES[name]


def _check_types(path: Path, header: GgufHeader) -> None:
    for tensor in header.tensors.values():
        if tensor.quant not in QUANTS:
            known = ", ".join(quant.name for quant in QUANTS)
            raise UnsupportedModel(
                f"{path}: tensor {tensor.name} has the unsupported type {tensor.quant.name}; supported: {known}."
            )


def _generation(path: Path, fields: Mapping[str, Any], config: ModelConfig) -> GenerationDefaults:
    """With the sampling that the file recommends, if it does."""
    return GenerationDefaults(
        eos_token_ids=_eos_token_ids(path, fields, config),
        temperature=_sampling(path, fields, "temp"),
        top_k=None if (top_k := _sampling(path, fields, "top_k")) is None else int(top_k),
        top_p=_sampling(path, fields, "top_p"),
    )


def _sampling(path: Path, fields: Mapping[str, Any], name: str) -> float | None:
    """Floats are stored in 32 bits: 0.6 must not become 0.6000000238418579."""
    value = fields.get(f"general.sampling.{name}")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < np.inf):
        raise CheckpointError(f"{path}: general.sampling.{name} must be a number of 0 or more, got {value!r}.")
    return None if value is None else float(str(np.float32(value)))


def _eos_token_ids(path: Path, fields: Mapping[str, Any], config: ModelConfig) -> tuple[int, ...]:
    ids = (fields.get(f"tokenizer.ggml.{name}_token_id") for name in _EOS_FIELDS)
    found = tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))
    for token_id in found:
        if not 0 <= token_id < config.vocab_size:
            raise CheckpointError(f"{path}: end token {token_id} is outside of the {config.vocab_size:,} tokens.")
    return found


def _dtype(header: GgufHeader) -> str:
    """Norm scales are kept in float32 by every converter, so only the matrices tell."""
    matrices = [tensor.quant for tensor in header.tensors.values() if len(tensor.shape) > 1]
    return "bfloat16" if matrices and all(quant == Quant.BF16 for quant in matrices) else "float32"


def _tensors(header: GgufHeader, architecture: Architecture, config: ModelConfig) -> Iterator[tuple[str, LazyTensor]]:
    """All tensors under Hugging Face's names."""
    for tensor in header.tensors.values():
        name = architecture.hf_name(tensor.name)
        if EXPERT in name and tensor.shape[0] == config.num_experts:
            for expert, part in enumerate(_parts(tensor)):
                yield name.replace(EXPERT, str(expert)), _lazy(part, _as_it_is)
        elif tensor.name != ROPE_FACTORS:
            yield name, _lazy(tensor, _undo(name, architecture, config))


def _parts(stack: GgufTensor) -> Iterator[GgufTensor]:
    """The matrices of a stack, each as a tensor."""
    count, *shape = stack.shape
    size = stack.num_bytes // count
    for index in range(count):
        offset = stack.offset + index * size
        yield replace(stack, shape=tuple(shape), offset=offset, num_bytes=size)


def _undo(name: str, architecture: Architecture, config: ModelConfig) -> Callable[[Array], Array]:
    """What brings the numbers of a tensor back into Hugging Face's form."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if architecture.is_interleaved and heads is not None:
        return lambda rows: _unpermute(rows, heads)
    if architecture.norm_offset and name.endswith("norm.weight"):
        return lambda scale: scale - architecture.norm_offset
    return _as_it_is


def _as_it_is(numbers: Array) -> Array:
    return numbers


def _lazy(tensor: GgufTensor, undo: Callable[[Array], Array]) -> LazyTensor:
    return LazyTensor(tensor.shape, lambda: undo(_read(tensor)))


def _read(tensor: GgufTensor) -> Array:
    """Read, not mapped: pages of a mapped file would count as this process's memory."""
    raw = np.fromfile(tensor.path, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
    if raw.size != tensor.num_bytes:
        raise CheckpointError(f"{tensor.path} became shorter while tensor {tensor.name} was read.")
    rows = raw.reshape(*tensor.shape[:-1], -1)
    return np.asarray(dequantize(rows, tensor.quant), dtype=np.float32).reshape(tensor.shape)


def _unpermute(weight: Array, num_heads: int) -> Array:
    """`[heads * head_dim, D]` with each head's rows as (half 0, half 1) pairs -> all of half 0, then all of half 1."""
    rows, width = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)
