"""Turns a ForeignModel's tensors into podstream's parameter tree, as its family's key table (`model.keys`) says."""

import re
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from model.config import ModelConfig
from model.errors import CheckpointError, UnsupportedModel
from model.foreign import Array, ForeignModel, LazyTensor, Region
from model.keys import EXPERT, LAYER, Key
from model.regions import fill, region_shape, whole
from model.tree import Names, Params, as_tree, put

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

DTYPES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
MAX_PROBLEMS = 3
_HARMLESS = re.compile(r"(model\.layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def expected_shapes(config: ModelConfig, keys: tuple[Key, ...]) -> Params:
    """The parameter tree of `config` with a shape tuple in place of each array."""
    tree: Params = {}
    for path, rows in leaves_of(config, keys).items():
        put(tree, path, rows[0].leaf_shape(config))
    return tree


def check_tensors(model: ForeignModel) -> None:
    """Compare every name and shape with the config, reading no numbers.

    Raises one CheckpointError that names the first few tensors that are missing, misshapen or unexpected.
    """
    config = model.config
    # A damaged number must not become a list of billions of names.
    for count, what, place in (
        (config.num_layers, "layers", LAYER),
        (config.num_layers * config.num_experts, "experts", EXPERT),
    ):
        if count > len(model.tensors) and any(place in key.source for key in model.keys):
            raise CheckpointError(
                f"{model.where}: its config says {count:,} {what}, but it holds only {len(model.tensors):,} tensors."
            )
    expected = dict(_expected_tensors(config, model.keys))
    problems = [*_misfits(expected, model.tensors, config), *_strangers(expected, model)]
    if problems:
        more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        raise CheckpointError(f"{model.where} does not fit its own config: {'; '.join(problems[:MAX_PROBLEMS])}{more}.")


def convert(model: ForeignModel, dtype: str | None = None) -> Params:
    """The whole parameter tree in memory; arguments and errors are those of `convert_leaves`."""
    return as_tree(convert_leaves(model, dtype))


def convert_leaves(
    model: ForeignModel, dtype: str | None = None, on_progress: Progress | None = None
) -> Iterator[tuple[Names, Array]]:
    """The leaves of the parameter tree one after another, as NumPy arrays of `dtype`.

    `dtype` is `float32` or `bfloat16`; None takes the model's own. A leaf is allocated once and filled tensor by
    tensor, so who lets go of each leaf needs memory for the largest one and a tensor.

    Raises CheckpointError for tensors that do not fit the config or hold NaN or Inf, UnsupportedModel for a dtype.
    """
    target = _target(dtype or model.dtype)
    check_tensors(model)
    leaves = leaves_of(model.config, model.keys)
    total = sum(prod(keys[0].leaf_shape(model.config)) for keys in leaves.values()) * target.itemsize
    done = 0

    def report(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if on_progress is not None:
            on_progress(done, total)

    for path, keys in leaves.items():
        yield path, read_region(model, keys, whole(keys[0].leaf_shape(model.config)), target, report)


def read_region(
    model: ForeignModel, keys: list[Key], region: Region, dtype: np.dtype[Any], report: Callable[[int], None]
) -> Array:
    """A region of the leaf that `keys` fill, as a new array. `report` is told of bytes as they come.

    Raises CheckpointError when a tensor is cut or corrupt, or holds NaN or Inf there.
    """

    def finite(name: str, part: Region) -> Array:
        numbers = model.tensors[name].region(part)
        if bad := numbers.size - int(np.count_nonzero(np.isfinite(numbers))):
            raise CheckpointError(
                f"{model.where}: tensor {name} holds {bad:,} numbers of {numbers.size:,} that are NaN or Inf."
            )
        return numbers

    out = np.empty(region_shape(region), dtype)
    for num_bytes in fill(out, region, keys, model.config, finite):
        report(num_bytes)
    return out


def leaves_of(config: ModelConfig, keys: tuple[Key, ...]) -> dict[Names, list[Key]]:
    """Every leaf of the tree, and the rows that fill it."""
    leaves: dict[Names, list[Key]] = {}
    for key in keys:
        if not (key.is_head and config.tie_embeddings):
            leaves.setdefault(key.path, []).append(key)
    return leaves


def _expected_tensors(config: ModelConfig, keys: tuple[Key, ...]) -> Iterator[tuple[str, Key]]:
    for rows in leaves_of(config, keys).values():
        for key in rows:
            for part in key.parts(config):
                yield part.name, key


def _misfits(expected: Mapping[str, Key], found: Mapping[str, LazyTensor], config: ModelConfig) -> Iterator[str]:
    for name, key in expected.items():
        shape = key.tensor_shape(config)
        if name not in found:
            yield f"tensor {name} is missing"
        elif not _fits(found[name].shape, shape, key):
            yield f"tensor {name} has shape {list(found[name].shape)}, expected {list(shape)}"


def _fits(found: tuple[int, ...], expected: tuple[int, ...], key: Key) -> bool:
    return len(found) == len(expected) and all(
        size == wanted or (key.may_be_longer and axis == "V" and size > wanted)
        for size, wanted, axis in zip(found, expected, key.theirs, strict=True)
    )


def _strangers(expected: Mapping[str, Key], model: ForeignModel) -> Iterator[str]:
    """A tensor that is ignored in silence gives wrong answers, unless it is known to carry nothing of its own."""
    tied_heads = {key.source for key in model.keys if key.is_head and model.config.tie_embeddings}
    for name in model.tensors:
        if name not in expected and name not in tied_heads and not _HARMLESS.fullmatch(name):
            yield f"tensor {name} is unexpected"


def _target(dtype: str) -> np.dtype[Any]:
    if dtype not in DTYPES:
        raise UnsupportedModel(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}.")
    return DTYPES[dtype]
