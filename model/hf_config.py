"""HfConfig: a `config.json` as Hugging Face writes it, and what all families call by the same names.

A field may be missing where the authors' code has a default, lie in a nested `text_config` where the model does more
than text, and has moved over the years: rope stands in `rope_theta` and `rope_scaling`, in `rope_parameters`, or there
once for each kind of layer.
"""

from collections.abc import Sequence
from typing import Any

from model.config import LinearScaling, RopeScaling
from model.errors import CheckpointError, UnsupportedModel
from model.fields import MAX_COUNT, Fields, Json, shown

FULL, SLIDING = "full_attention", "sliding_attention"
MAX_LAYERS = 10_000


def text_fields(config: Json, where: str = "config.json") -> Json:
    """The fields of the text model, and behind them those that only the whole model has. Raises CheckpointError."""
    text = Fields(config, where).object("text_config")
    return {**config, **{name: text.get(name) for name in text}}


class HfConfig(Fields):
    def __init__(self, fields: Json, defaults: Json, where: str = "config.json") -> None:
        """`defaults` are those of the authors' code; what has none there must be in `fields`."""
        super().__init__({**defaults, **fields}, where)

    def needed(self, name: str, *, most: int = MAX_COUNT) -> int:
        """A count that must be there. Raises CheckpointError."""
        if name not in self:
            raise CheckpointError(f"{self.where} lacks {name}.")
        if (value := self.count(name, most=most)) is None:
            raise self.wrong(name, "a positive whole number")
        return value

    @property
    def num_layers(self) -> int:
        return self.needed("num_hidden_layers", most=MAX_LAYERS)

    def refuse(self, *flags: str) -> None:
        """Raises UnsupportedModel when one of these is set."""
        for flag in flags:
            if self.get(flag):
                raise UnsupportedModel(
                    f"{self.where} sets {flag}, which the decoder for {self.get('model_type')!r} here does not have."
                )

    def shape(self, activation: str = "hidden_act") -> dict[str, Any]:
        """Fields of ModelConfig that every family has. `activation` is the name of that field."""
        heads, width = self.needed("num_attention_heads"), self.needed("hidden_size")
        eps = self.number("rms_norm_eps", least=0)
        return {
            "vocab_size": self.needed("vocab_size"),
            "num_layers": self.num_layers,
            "embed_dim": width,
            "mlp_dim": self.needed("intermediate_size"),
            "num_heads": heads,
            "num_kv_heads": self.count("num_key_value_heads") or heads,
            "head_dim": self.count("head_dim") or width // heads,
            "max_seq_len": self.needed("max_position_embeddings"),
            "norm_eps": 1e-6 if eps is None else eps,
            "tie_embeddings": self.flag("tie_word_embeddings"),
            "activation": self._activation(activation),
            **self.rope(FULL),
        }

    def _activation(self, name: str) -> str:
        known = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
        if (value := self.text(name) or "silu") not in known:
            raise UnsupportedModel(
                f"{self.where}: {name} {shown(value)} is not supported; supported: {', '.join(known)}."
            )
        return known[value]

    def rope_fields(self, layer_kind: str) -> Fields:
        """What is said of the rope of layers of this kind. Where both names are there, transformers takes the old."""
        rope = self.object("rope_scaling") or self.object("rope_parameters")
        return rope.object(layer_kind) or rope

    def rope(self, layer_kind: str) -> dict[str, Any]:
        """`rope_theta` and `rope_scaling` of ModelConfig for layers of this kind."""
        rope = self.rope_fields(layer_kind)
        share = rope.number("partial_rotary_factor") or self.number("partial_rotary_factor") or 1.0
        if share != 1:
            raise UnsupportedModel(f"{self.where}: partial_rotary_factor {share:g} is not supported; supported: 1.")
        theta = rope.number("rope_theta", above=0) or self.number("rope_theta", above=0) or 10_000.0
        return {"rope_theta": theta, "rope_scaling": _rope_scaling(rope, self.needed("max_position_embeddings"))}

    def windows(self, pattern: Sequence[str], window: int | None) -> tuple[int | None, ...]:
        """One per layer, from `layer_types` or else from `pattern`, which is repeated; empty if no layer has one."""
        kinds = self.items("layer_types") or [pattern[layer % len(pattern)] for layer in range(self.num_layers)]
        if unknown := sorted({*map(str, kinds)} - {FULL, SLIDING}):
            named = shown(", ".join(unknown))
            raise UnsupportedModel(
                f"{self.where}: layer_types {named} are not supported; supported: {FULL}, {SLIDING}."
            )
        if window is None or SLIDING not in kinds:
            return ()
        return tuple(window if kind == SLIDING else None for kind in kinds)


def _rope_scaling(rope: Fields, max_positions: int) -> RopeScaling | LinearScaling | None:
    kind = rope.text("rope_type") or rope.text("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise UnsupportedModel(f"{rope.where}: rope scaling {shown(kind)} is not supported; supported: llama3, linear.")

    def needed(name: str) -> float:
        if (value := rope.number(name, above=0)) is None:
            raise CheckpointError(f"{rope.where}: rope scaling {kind!r} lacks {name}.")
        return value

    match kind:
        case "linear":
            return LinearScaling(needed("factor"))
        case "llama3":
            low, high = needed("low_freq_factor"), needed("high_freq_factor")
            if not low < high:
                raise rope.wrong("high_freq_factor", f"more than low_freq_factor, {low:g}")
            original = rope.count("original_max_position_embeddings") or max_positions
            return RopeScaling(needed("factor"), low, high, original)
    return None
