"""ForeignModel: what every reader of foreign checkpoints hands to `model.convert`. Plain data, imports no JAX.

All readers speak Hugging Face's language: tensors carry its names (`model.layers.0.self_attn.q_proj.weight`) and its
shapes (`[out, in]`), whatever the file called them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import tokenizers

from model.card import GenerationDefaults, TextAssets
from model.config import ModelConfig
from model.errors import CheckpointError
from model.keys import Key

MAX_REASON_CHARS = 300

Array = npt.NDArray[Any]
Region = tuple[slice, ...]
"""One slice for each axis, with a start and a stop."""


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is read only when asked, so that a model larger than memory can be checked by name and shape."""

    shape: tuple[int, ...]
    read: Callable[[], Array]
    """Numbers as float32, bfloat16 or float16, in `shape`. Raises CheckpointError when the file is cut or corrupt."""
    read_region: Callable[[Region], Array] | None = None
    """The same for a region, where the format lets one be read without the rest."""

    def region(self, region: Region) -> Array:
        """Read at least what lies in `region`, and return that."""
        return self.read()[region] if self.read_region is None else self.read_region(region)


@dataclass(frozen=True, slots=True)
class ForeignModel:
    """A model as it lies in a file or folder that podstream did not write."""

    where: str
    """The file or folder, for messages."""
    config: ModelConfig
    text: TextAssets
    generation: GenerationDefaults
    keys: tuple[Key, ...]
    """Where its tensors go."""
    tensors: Mapping[str, LazyTensor]
    dtype: str
    """`float32` or `bfloat16`, as `choose_dtype` says."""
    notes: tuple[str, ...] = ()
    """What an operator should know of how it was read, each a sentence without its full stop."""
    below: str = ""
    """What of `where` was read, if it holds more: the step of a run, as a path relative to it."""


def choose_dtype(num_bytes: Mapping[str, int]) -> tuple[str, tuple[str, ...]]:
    """What numbers are kept as of which `num_bytes` tells how many bytes are `bfloat16`, `float16` and `float32`, and
    notes: bfloat16 if most of the bytes are, else float32, which holds all of them without loss. A few norms in float32
    must not double the memory of a model."""
    total, small = sum(num_bytes.values()), num_bytes.get("bfloat16", 0)
    if 2 * small <= total:
        return "float32", ()
    others = [f"{size:,} bytes of {kind}" for kind, size in num_bytes.items() if size and kind != "bfloat16"]
    if not others:
        return "bfloat16", ()
    return "bfloat16", (
        f"of {total:,} bytes of weights {small:,} are bfloat16, and so all are kept; {' and '.join(others)} are "
        "rounded (--dtype float32 keeps them, in twice the memory)",
    )


def load_tokenizer(where: str, tokenizer_json: str) -> tokenizers.Tokenizer:
    """Raises CheckpointError when the `tokenizers` library cannot load this `tokenizer.json`."""
    try:
        return tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"{where}: the tokenizer cannot be loaded: {str(error)[:MAX_REASON_CHARS]}.") from error
