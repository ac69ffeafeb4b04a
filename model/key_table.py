"""KeyTable: a file that says where the tensors of a Flax tree go, and what their shapes do not tell of the model.

    prefix = "params"                      # before all names; not needed where it can be found
    layout = "maxtext"                     # instead of [tensors], if the layout is known but not recognised

    [model]                                # fields of a Hugging Face config.json that no config.json gives
    model_type = "llama"
    max_position_embeddings = 2048
    normalize_embedding_logits = true      # no field of theirs: tied logits are divided by the root of the width

    [tensors]                              # what it is = [its name, its axes]
    embed = ["tok.embedding", "V D"]
    q = ["blocks.attn.wq", "L D N H"]      # layers stacked; or one by one: ["block_{layer}.attn.wq", "D N H"]
    gate = {name = "blocks.mlp.gate", axes = "L D F", times = 0.5}

Axes: L layers, V vocabulary, D width, F MLP width, N query heads, K KV heads, H head dim, Z experts, C the two of a
pair; letters side by side are one flattened axis. What can be said is listed in `model.keys.TARGETS`.
`interleaved = true` says that rope turns neighbours of a head instead of its halves.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.errors import CheckpointError
from model.fields import Json
from model.keys import Key, key

NAME = "podstream.toml"
_SECTIONS = {"prefix", "layout", "model", "tensors"}
_OPTIONS = {"name", "axes", "times", "interleaved"}
_LETTERS = set("LVDFNKHZCA")


@dataclass(frozen=True, slots=True)
class KeyTable:
    where: str = ""
    prefix: str | None = None
    layout: str | None = None
    model: Json = field(default_factory=dict)
    keys: tuple[Key, ...] = ()

    @classmethod
    def read(cls, path: Path) -> "KeyTable":
        """Raises CheckpointError naming what is not understood."""
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(f"there is no key table at {path}.") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise CheckpointError(f"{path} is not a TOML file: {error}.") from error
        if unknown := sorted(set(data) - _SECTIONS):
            raise CheckpointError(f"{path}: {unknown[0]!r} is not one of {', '.join(sorted(_SECTIONS))}.")
        try:
            keys = tuple(_key(target, row) for target, row in data.get("tensors", {}).items())
            return cls(str(path), data.get("prefix"), data.get("layout"), dict(data.get("model", {})), keys)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error


def _key(target: str, row: Any) -> Key:
    options: Mapping[str, Any] = row if isinstance(row, dict) else {}
    if isinstance(row, list) and len(row) == 2:
        options = {"name": row[0], "axes": row[1]}
    name, axes, times = options.get("name"), options.get("axes"), options.get("times", 1.0)
    if not (isinstance(name, str) and isinstance(axes, str) and isinstance(times, int | float)):
        raise CheckpointError(f'tensor {target} must read like ["its.name", "D F"].')
    if unknown := sorted(set(options) - _OPTIONS):
        raise CheckpointError(f"tensor {target}: {unknown[0]!r} is not one of {', '.join(sorted(_OPTIONS))}.")
    if unknown := sorted(set(axes) - _LETTERS - {" "}):
        raise CheckpointError(f"tensor {target}: axis {unknown[0]!r} is not one of {' '.join(sorted(_LETTERS))}.")
    interleaved = bool(options.get("interleaved", False))
    return key(target, name.replace("/", "."), axes, times=float(times), is_interleaved=interleaved)
