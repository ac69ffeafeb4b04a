"""ModelConfig: the numbers that define a decoder. Plain data, imports no JAX."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.errors import CheckpointError


class InconsistentConfig(CheckpointError):
    """No decoder has these numbers; the message names them."""


ACTIVATIONS = ("silu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency-dependent stretching of rope (Llama 3.1 release, `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All rotations are slower by `factor`, as if positions were closer together (`rope_type: linear`)."""

    factor: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder, and how it differs from Llama's, which the defaults describe. Widths are in elements,
    `max_seq_len` in tokens."""

    vocab_size: int
    num_layers: int
    embed_dim: int
    mlp_dim: int
    """Of one expert, where there are experts."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | LinearScaling | None = None
    tie_embeddings: bool = False
    windows: tuple[int | None, ...] = ()
    """For each layer, how many tokens a token sees, itself included; None for all. Empty where no layer has one."""
    local_rope_theta: float | None = None
    """Base of the rope of layers with a window, which is not scaled; None where all layers have the same rope."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normed, head by head, before they are turned."""
    query_scale: float | None = None
    """Scores are divided by its square root; None stands for `head_dim`."""
    attention_softcap: float | None = None
    """Scores s become c * tanh(s / c), as do logits with `logits_softcap`."""
    logits_softcap: float | None = None
    logits_scale: float = 1.0
    """Logits are multiplied by it before they are capped."""
    sandwich_norms: bool = False
    """What attention and MLP give is normed before it is added."""
    norm_offset: float = 0.0
    """Added to the scale of every norm: 1 where scales are stored as their difference from 1."""
    scale_embeddings: bool = False
    """Token vectors are multiplied by the square root of `embed_dim`."""
    activation: str = "silu"
    """Of the MLP's gate, one of `ACTIVATIONS`."""
    num_experts: int = 0
    """MLPs in each layer, of which a router picks `experts_per_token`; 0 where there is one and no router."""
    experts_per_token: int = 0
    norm_expert_shares: bool = True
    """Whether the shares of a token's experts are made to add up to 1."""

    def __post_init__(self) -> None:
        for field in ("vocab_size", "num_layers", "embed_dim", "mlp_dim", "num_heads", "num_kv_heads", "head_dim",
                      "max_seq_len"):  # fmt: skip
            _check_count(field, getattr(self, field))
        if self.num_heads % self.num_kv_heads:
            raise InconsistentConfig(
                f"model config: {self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly."
            )
        if self.head_dim % 2:
            raise InconsistentConfig(f"model config: head_dim must be even for rope, got {self.head_dim}.")
        if self.windows and len(self.windows) != self.num_layers:
            raise InconsistentConfig(f"model config: {len(self.windows)} windows for {self.num_layers} layers.")
        for window in self.windows:
            if window is not None:
                _check_count("a layer's window", window)
        for field in ("attention_softcap", "logits_softcap", "query_scale", "local_rope_theta"):
            if (value := getattr(self, field)) is not None and not value > 0:
                raise InconsistentConfig(f"model config: {field} must be positive, got {value!r}.")
        if not 0 < self.logits_scale < math.inf:
            raise InconsistentConfig(f"model config: logits_scale must be positive, got {self.logits_scale!r}.")
        if self.activation not in ACTIVATIONS:
            raise InconsistentConfig(
                f"model config: activation {self.activation!r} is not one of {', '.join(ACTIVATIONS)}."
            )
        if not (self.num_experts == self.experts_per_token == 0 or 1 <= self.experts_per_token <= self.num_experts):
            raise InconsistentConfig(
                f"model config: {self.experts_per_token} experts per token cannot be picked from {self.num_experts}."
            )

    @property
    def window(self) -> int | None:
        """The longest window if every layer has one: nobody ever looks at what lies before it."""
        bounded = [window for window in self.windows if window is not None]
        return max(bounded) if bounded and len(bounded) == self.num_layers else None

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
        try:
            if (scaling := values.get("rope_scaling")) is not None:
                values["rope_scaling"] = LinearScaling(**scaling) if len(scaling) == 1 else RopeScaling(**scaling)
            values["windows"] = tuple(values.get("windows", ()))
            return cls(**values)
        except TypeError as error:
            raise CheckpointError(f"model config: {error}.") from error

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InconsistentConfig(f"model config: {name} must be a positive whole number, got {value!r}.")
