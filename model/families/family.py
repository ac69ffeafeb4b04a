"""Family: what models of one architecture are called by others, as data: how their config is read, and a key table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from model.config import ModelConfig
from model.hf_config import HfConfig
from model.keys import Key


@dataclass(frozen=True, slots=True)
class Family:
    model_types: tuple[str, ...]
    """What `config.json` calls it."""
    read: Callable[[HfConfig], ModelConfig]
    """Raises UnsupportedModel or CheckpointError with the field that is not understood."""
    keys: tuple[Key, ...]
    """Rows of one leaf follow each other."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields that its `config.json` may leave out."""
    ignored: str | None = None
    """Pattern of the names of tensors that have nothing to do with text."""
