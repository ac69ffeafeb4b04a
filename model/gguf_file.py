"""Reads a Llama model from a GGUF file: config, tokenizer and lazily de-quantised tensors.

GGUF keeps the rows of q and k interleaved per head (its rope turns neighbouring pairs); Hugging Face and podstream
turn the two halves of a head. `_unpermute` undoes that.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Quant
from gguf import dequantize

from model.card import GenerationDefaults
from model.config import ModelConfig, RopeScaling
from model.errors import CheckpointError, UnsupportedModel
from model.foreign import Array, ForeignModel, LazyTensor
from model.gguf_header import GgufHeader, GgufTensor
from model.gguf_rope import infer_rope_scaling
from model.gguf_tokenizer import read_text_assets

QUANTS = (Quant.F32, Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q4_K, Quant.Q5_K, Quant.Q6_K)

ROPE_FACTORS = "rope_freqs.weight"
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_EOS_FIELDS = ("eos", "eot", "eom")


def read_gguf(path: Path) -> ForeignModel:
    """Open `path` and check what can be checked without reading tensors.

    Raises CheckpointError for a cut or corrupt file or missing metadata, UnsupportedModel for another architecture,
    tokenizer or tensor type.
    """
    header = GgufHeader.read(path)
    _check_supported(path, header)
    config = _config(path, header)
    return ForeignModel(
        where=str(path),
        config=config,
        text=read_text_assets(path, header.fields),
        generation=GenerationDefaults(eos_token_ids=_eos_token_ids(path, header.fields, config)),
        tensors={_hf_name(name): _lazy(path, tensor, config)
                 for name, tensor in header.tensors.items() if name != ROPE_FACTORS},
        dtype=_dtype(header),
    )  # fmt: skip


def _check_supported(path: Path, header: GgufHeader) -> None:
    if (architecture := header.fields.get("general.architecture")) != "llama":
        raise UnsupportedModel(f"{path}: architecture {architecture!r} is not supported yet; supported: llama.")
    if experts := header.fields.get("llama.expert_count"):
        raise UnsupportedModel(f"{path}: a mixture of {experts} experts is not supported yet.")
    for tensor in header.tensors.values():
        if tensor.quant not in QUANTS:
            known = ", ".join(quant.name for quant in QUANTS)
            raise UnsupportedModel(
                f"{path}: tensor {tensor.name} has the unsupported type {tensor.quant.name}; supported: {known}."
            )


def _config(path: Path, header: GgufHeader) -> ModelConfig:
    fields = _Fields(path, header.fields)
    heads, width = fields.count("attention.head_count"), fields.count("embedding_length")
    head_dim = fields.count("attention.key_length", default=width // heads)
    for other in ("attention.value_length", "rope.dimension_count"):
        if (value := fields.count(other, default=head_dim)) != head_dim:
            raise UnsupportedModel(f"{path}: llama.{other} {value} differs from the head's {head_dim}.")
    theta = fields.number("rope.freq_base", default=10_000.0)
    return ModelConfig(
        vocab_size=fields.count("vocab_size", default=len(header.fields.get("tokenizer.ggml.tokens", []))),
        num_layers=fields.count("block_count"),
        embed_dim=width,
        mlp_dim=fields.count("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=fields.count("attention.head_count_kv", default=heads),
        head_dim=head_dim,
        max_seq_len=fields.count("context_length"),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", default=1e-5),
        rope_theta=theta,
        rope_scaling=_rope_scaling(path, header, head_dim, theta),
        tie_embeddings="output.weight" not in header.tensors,
    )


class _Fields:
    """The `llama.*` numbers of the metadata, with their types checked."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self._path = path
        self._fields = fields

    def count(self, name: str, default: int | None = None) -> int:
        value = self._fields.get(f"llama.{name}", default)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self._path}: llama.{name} must be a positive whole number, got {value!r}.")
        return value

    def number(self, name: str, default: float) -> float:
        """Floats are stored in 32 bits: 1e-5 must not become 9.999999747378752e-06."""
        value = self._fields.get(f"llama.{name}", default)
        if not isinstance(value, int | float) or not 0 < value < np.inf:
            raise CheckpointError(f"{self._path}: llama.{name} must be a positive number, got {value!r}.")
        return float(str(np.float32(value)))


def _rope_scaling(path: Path, header: GgufHeader, head_dim: int, theta: float) -> RopeScaling | None:
    kind = header.fields.get("llama.rope.scaling.type", "none")
    if kind != "none":
        raise UnsupportedModel(f"{path}: rope scaling {kind!r} is not supported; supported: llama3.")
    if ROPE_FACTORS not in header.tensors:
        return None
    return infer_rope_scaling(str(path), _read(path, header.tensors[ROPE_FACTORS]), head_dim, theta)


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


def _hf_name(name: str) -> str:
    """A name that no table knows is passed on as it is, to be reported as unexpected."""
    if match := _LAYER.fullmatch(name):
        layer, part = match.groups()
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight" if part in _LAYER_NAMES else name
    return _NAMES.get(name, name)


def _lazy(path: Path, tensor: GgufTensor, config: ModelConfig) -> LazyTensor:
    heads = {"attn_q.weight": config.num_heads, "attn_k.weight": config.num_kv_heads}.get(_part(tensor.name))
    if heads is None:
        return LazyTensor(tensor.shape, lambda: _read(path, tensor))
    return LazyTensor(tensor.shape, lambda: _unpermute(_read(path, tensor), heads))


def _part(name: str) -> str:
    return name.split(".", 2)[-1]


def _read(path: Path, tensor: GgufTensor) -> Array:
    """Read, not mapped: pages of a mapped file would count as this process's memory."""
    raw = np.fromfile(path, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
    if raw.size != tensor.num_bytes:
        raise CheckpointError(f"{path} became shorter while tensor {tensor.name} was read.")
    rows = raw.reshape(*tensor.shape[:-1], -1)
    return np.asarray(dequantize(rows, tensor.quant), dtype=np.float32).reshape(tensor.shape)


def _unpermute(weight: Array, num_heads: int) -> Array:
    """`[heads * head_dim, D]` with each head's rows as (half 0, half 1) pairs -> all of half 0, then all of half 1."""
    rows, width = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)
