"""Turns the metadata of a GGUF file into what `config.json` would say, so that a family has one reader of configs.

GGUF leaves out what llama.cpp knows by heart: those numbers stand here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from model.errors import CheckpointError, UnsupportedModel
from model.fields import Json
from model.gguf_keys import check_keys
from model.gguf_names import Architecture
from model.hf_config import FULL, SLIDING

_COUNTS = {
    "num_hidden_layers": "block_count", "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window", "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
}  # fmt: skip
_NUMBERS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_NEEDED = ("num_hidden_layers", "max_position_embeddings")
_LOCAL_ROPE_THETA = 10_000.0  # of Gemma 3
_NOT_BY_HEAD_DIM = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models, whose scores are divided otherwise


def config_json(path: Path, fields: Mapping[str, Any], name: str, architecture: Architecture, *, is_tied: bool) -> Json:
    """`fields` are those of the file, `name` is its `general.architecture`.

    Raises CheckpointError for a missing or contradicting field, UnsupportedModel for a feature that is not known.
    """
    read = _Fields(path, fields, name)
    heads, width = read.count("attention.head_count"), read.count("embedding_length")
    head_dim = read.count("attention.key_length", default=width // heads)
    for other in ("attention.value_length", "rope.dimension_count"):
        if (value := read.count(other, default=head_dim)) != head_dim:
            raise UnsupportedModel(f"{path}: {name}.{other} {value} differs from the head's {head_dim}.")
    rest = {theirs: read.count(ours) for theirs, ours in _COUNTS.items() if theirs in _NEEDED or read.get(ours)}
    is_capped = architecture.model_type.startswith("gemma")  # without a number it would have its usual one
    wanted = {theirs: ours for theirs, ours in _NUMBERS.items() if read.get(ours) or (is_capped and read.has(ours))}
    caps = {theirs: read.number(ours) for theirs, ours in wanted.items()}
    by_width = read.count("block_count") == _NOT_BY_HEAD_DIM.get(name)
    config = {
        "model_type": architecture.model_type,
        "vocab_size": read.count("vocab_size", default=len(fields.get("tokenizer.ggml.tokens", []))),
        "hidden_size": width,
        # Where all layers have experts it may be left out, and is not used.
        "intermediate_size": read.count("feed_forward_length", default=rest.get("moe_intermediate_size")),
        "num_attention_heads": heads,
        "num_key_value_heads": read.count("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon", default=1e-5),
        "rope_parameters": _rope(read, name),
        "tie_word_embeddings": is_tied,
        "query_pre_attn_scalar": width // heads if by_width else head_dim,
        "norm_topk_prob": True,
        **_window_pattern(read),
        **rest,
        **caps,
    }
    check_keys(path, fields, name, config)
    return config


def _window_pattern(read: "_Fields") -> Json:
    """Which layers have the window: every one but each n-th, or listed one by one."""
    match read.get("attention.sliding_window_pattern"):
        case list() as kinds:
            return {"layer_types": [SLIDING if is_sliding else FULL for is_sliding in kinds]}
        case int() as every if every > 0:
            return {"sliding_window_pattern": every}
    return {}


def _rope(read: "_Fields", name: str) -> Json:
    theta = read.number("rope.freq_base", default=10_000.0)
    factor = read.get("rope.scaling.factor", read.get("rope.scale_linear", 0)) or 1.0  # 0 is unset to llama.cpp
    match kind := read.get("rope.scaling.type", "linear"):  # what llama.cpp takes a factor for that has no type
        case "linear" if factor != 1.0:
            key = "rope.scaling.factor" if read.get("rope.scaling.factor") else "rope.scale_linear"
            rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "linear", "factor": read.number(key)}
        case "none" | "linear":
            rope = {"rope_theta": theta}
        case _:
            raise UnsupportedModel(f"{read.path}: rope scaling {kind!r} is not supported; supported: llama3, linear.")
    if name != "gemma3":
        return rope
    return {**rope, SLIDING: {"rope_theta": read.number("rope.freq_base_swa", default=_LOCAL_ROPE_THETA)}}


class _Fields:
    """The numbers of one architecture in the metadata, with their types checked."""

    def __init__(self, path: Path, fields: Mapping[str, Any], name: str) -> None:
        self.path = path
        self._fields = fields
        self._name = name

    def get(self, name: str, default: Any = None) -> Any:
        return self._fields.get(f"{self._name}.{name}", default)

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.path}: {self._name}.{name} must be a positive whole number, got {value!r}.")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Floats are stored in 32 bits: 1e-5 must not become 9.999999747378752e-06."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or not 0 < value < np.inf:
            raise CheckpointError(f"{self.path}: {self._name}.{name} must be a positive number, got {value!r}.")
        return float(str(np.float32(value)))
