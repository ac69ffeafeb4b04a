"""ModelConfig: the numbers that define a decoder. Plain data, imports no JAX."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.errors import CheckpointError, UnsupportedModel


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency-dependent stretching of rope (Llama 3.1 release, `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama-style decoder. Widths are in elements, `max_seq_len` in tokens."""

    vocab_size: int
    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for field in ("vocab_size", "num_layers", "embed_dim", "mlp_dim", "num_heads", "num_kv_heads", "head_dim",
                      "max_seq_len"):  # fmt: skip
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CheckpointError(f"model config: {field} must be a positive whole number, got {value!r}.")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"model config: {self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly."
            )
        if self.head_dim % 2:
            raise CheckpointError(f"model config: head_dim must be even for rope, got {self.head_dim}.")

    @classmethod
    def tiny(cls, **changes: Any) -> "ModelConfig":
        """A two-layer model for tests: 2 KV heads shared by 4 query heads, all sizes different."""
        base = cls(
            vocab_size=160, num_layers=2, embed_dim=48, mlp_dim=96, num_heads=4, num_kv_heads=2, head_dim=16,
            max_seq_len=256, tie_embeddings=True,
        )  # fmt: skip
        return dataclasses.replace(base, **changes)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ModelConfig":
        """The inverse of `to_json`. Raises CheckpointError on a missing or unknown field."""
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise CheckpointError(f"model config: unknown field(s) {', '.join(unknown)}.")
        values = dict(fields)
        if values.get("rope_scaling") is not None:
            values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
        try:
            return cls(**values)
        except TypeError as error:
            raise CheckpointError(f"model config: {error}.") from error

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Read a Hugging Face `config.json`. Raises UnsupportedModel for anything but a plain Llama decoder."""
        model_type = config.get("model_type")
        if model_type != "llama":
            raise UnsupportedModel(f"model_type {model_type!r} is not supported yet; supported: llama.")
        for flag in ("attention_bias", "mlp_bias"):
            if config.get(flag):
                raise UnsupportedModel(f"config.json sets {flag}, which the Llama decoder here does not have.")
        if (act := config.get("hidden_act", "silu")) != "silu":
            raise UnsupportedModel(f"hidden_act {act!r} is not supported; supported: silu.")
        try:
            heads, width = config["num_attention_heads"], config["hidden_size"]
            rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
            return cls(
                vocab_size=config["vocab_size"],
                num_layers=config["num_hidden_layers"],
                embed_dim=width,
                mlp_dim=config["intermediate_size"],
                num_heads=heads,
                num_kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or width // heads,
                max_seq_len=config["max_position_embeddings"],
                norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
                rope_scaling=_rope_scaling(rope),
                tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            )
        except KeyError as error:
            raise CheckpointError(f"config.json lacks {error.args[0]}.") from error


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnsupportedModel(f"rope scaling {kind!r} is not supported; supported: llama3.")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position=int(rope["original_max_position_embeddings"]),
    )
