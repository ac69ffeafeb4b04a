"""HfConfig: a `config.json` as Hugging Face writes it, and what all families call by the same names.

A field may be missing where the authors' code has a default, lie in a nested `text_config` where the model does more
than text, and has moved over the years: rope stands in `rope_theta` and `rope_scaling`, in `rope_parameters`, or there
once for each kind of layer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from model.config import LinearScaling, RopeScaling
from model.errors import CheckpointError, UnsupportedModel

Json = Mapping[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"


def text_fields(config: Json) -> Json:
    """The fields of the text model, and behind them those that only the whole model has."""
    return {**config, **(config.get("text_config") or {})}


class HfConfig:
    def __init__(self, fields: Json, defaults: Json) -> None:
        """`defaults` are those of the authors' code; what has none there must be in `fields`."""
        self._fields = {**defaults, **fields}

    def __getitem__(self, name: str) -> Any:
        """Raises CheckpointError when the field is missing."""
        if name not in self._fields:
            raise CheckpointError(f"config.json lacks {name}.")
        return self._fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self._fields.get(name, default)

    def number(self, name: str) -> float | None:
        """A field that may be null."""
        value = self.get(name)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise CheckpointError(f"config.json: {name} must be a number, got {value!r}.")
        return None if value is None else float(value)

    def refuse(self, *flags: str) -> None:
        """Raises UnsupportedModel when one of these is set."""
        for flag in flags:
            if self.get(flag):
                raise UnsupportedModel(
                    f"config.json sets {flag}, which the decoder for {self.get('model_type')!r} here does not have."
                )

    def shape(self, activation: str = "hidden_act") -> dict[str, Any]:
        """Fields of ModelConfig that every family has. `activation` is the name of that field."""
        heads, width = self["num_attention_heads"], self["hidden_size"]
        if not isinstance(heads, int) or heads < 1:
            raise CheckpointError(f"config.json: num_attention_heads must be a positive whole number, got {heads!r}.")
        return {
            "vocab_size": self["vocab_size"],
            "num_layers": self["num_hidden_layers"],
            "embed_dim": width,
            "mlp_dim": self["intermediate_size"],
            "num_heads": heads,
            "num_kv_heads": self.get("num_key_value_heads") or heads,
            "head_dim": self.get("head_dim") or width // heads,
            "max_seq_len": self["max_position_embeddings"],
            "norm_eps": self.number("rms_norm_eps") or 1e-6,
            "tie_embeddings": bool(self.get("tie_word_embeddings", False)),
            "activation": self._activation(activation),
            **self.rope(FULL),
        }

    def _activation(self, name: str) -> str:
        known = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
        if (value := self.get(name, "silu")) not in known:
            raise UnsupportedModel(f"{name} {value!r} is not supported; supported: {', '.join(known)}.")
        return known[value]

    def rope(self, layer_kind: str) -> dict[str, Any]:
        """`rope_theta` and `rope_scaling` of ModelConfig for layers of this kind."""
        rope = self.get("rope_parameters") or self.get("rope_scaling") or {}
        rope = rope.get(layer_kind, rope)
        if (share := rope.get("partial_rotary_factor", self.get("partial_rotary_factor")) or 1) != 1:
            raise UnsupportedModel(f"partial_rotary_factor {share} is not supported; supported: 1.")
        theta = rope.get("rope_theta") or self.number("rope_theta") or 10_000.0
        return {"rope_theta": float(theta), "rope_scaling": _rope_scaling(rope)}

    def windows(self, pattern: Sequence[str], window: int | None) -> tuple[int | None, ...]:
        """One per layer, from `layer_types` or else from `pattern`, which is repeated; empty if no layer has one."""
        num_layers = self["num_hidden_layers"]
        kinds = self.get("layer_types") or [pattern[layer % len(pattern)] for layer in range(num_layers)]
        if unknown := sorted({*map(str, kinds)} - {FULL, SLIDING}):
            raise UnsupportedModel(f"layer_types {', '.join(unknown)} are not supported; supported: {FULL}, {SLIDING}.")
        if window is None or SLIDING not in kinds:
            return ()
        return tuple(window if kind == SLIDING else None for kind in kinds)


def _rope_scaling(rope: Json) -> RopeScaling | LinearScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    try:
        match kind:
            case "default":
                return None
            case "linear":
                return LinearScaling(float(rope["factor"]))
            case "llama3":
                return RopeScaling(
                    factor=float(rope["factor"]),
                    low_freq_factor=float(rope["low_freq_factor"]),
                    high_freq_factor=float(rope["high_freq_factor"]),
                    original_max_position=int(rope["original_max_position_embeddings"]),
                )
    except KeyError as error:
        raise CheckpointError(f"config.json: rope scaling {kind!r} lacks {error.args[0]}.") from error
    raise UnsupportedModel(f"rope scaling {kind!r} is not supported; supported: llama3, linear.")
