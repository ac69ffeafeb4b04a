"""Turns a ForeignModel's tensors into podstream's parameter tree, as its family's key table (`model.keys`) says."""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from model.config import ModelConfig
from model.errors import CheckpointError, UnsupportedModel
from model.foreign import Array, ForeignModel, LazyTensor
from model.keys import HEAD, Key
from model.tree import Names, Params, put

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
    for path, rows in _leaves(config, keys):
        put(tree, path, rows[0].leaf_shape(config))
    return tree


def check_tensors(model: ForeignModel) -> None:
    """Compare every name and shape with the config, reading no numbers.

    Raises one CheckpointError that names the first few tensors that are missing, misshapen or unexpected.
    """
    config = model.config
    # A damaged number must not become a list of billions of names.
    for count, what in ((config.num_layers, "layers"), (config.num_layers * config.num_experts, "experts")):
        if count > len(model.tensors):
            raise CheckpointError(
                f"{model.where}: its config says {count:,} {what}, but it holds only {len(model.tensors):,} tensors."
            )
    expected = dict(_expected_tensors(config, model.keys))
    problems = [*_misfits(expected, model.tensors), *_strangers(expected, model)]
    if problems:
        more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        raise CheckpointError(f"{model.where} does not fit its own config: {'; '.join(problems[:MAX_PROBLEMS])}{more}.")


def convert(model: ForeignModel, dtype: str | None = None) -> Params:
    """The whole parameter tree in memory; arguments and errors are those of `convert_leaves`."""
    tree: Params = {}
    for path, leaf in convert_leaves(model, dtype):
        put(tree, path, leaf)
    return tree


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
    leaves = _leaves(model.config, model.keys)
    total = sum(prod(keys[0].leaf_shape(model.config)) for _, keys in leaves) * target.itemsize
    done = 0
    for path, keys in leaves:
        leaf = np.empty(keys[0].leaf_shape(model.config), target)
        for key in keys:
            for num_bytes in _fill(model, key, leaf):
                done += num_bytes
                if on_progress is not None:
                    on_progress(done, total)
        yield path, leaf


def _leaves(config: ModelConfig, keys: tuple[Key, ...]) -> list[tuple[Names, list[Key]]]:
    """Every leaf of the tree, and the rows that fill it."""
    kept = [key for key in keys if not (key.source == HEAD and config.tie_embeddings)]
    return [(path, list(rows)) for path, rows in groupby(kept, key=lambda key: key.path)]


def _expected_tensors(config: ModelConfig, keys: tuple[Key, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for _, rows in _leaves(config, keys):
        for key in rows:
            for name, _ in key.tensors(config):
                yield name, key.tensor_shape(config)


def _misfits(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, LazyTensor]) -> Iterator[str]:
    for name, shape in expected.items():
        if name not in found:
            yield f"tensor {name} is missing"
        elif found[name].shape != shape:
            yield f"tensor {name} has shape {list(found[name].shape)}, expected {list(shape)}"


def _strangers(expected: Mapping[str, tuple[int, ...]], model: ForeignModel) -> Iterator[str]:
    """A tensor that is ignored in silence gives wrong answers, unless it is known to carry nothing of its own."""
    for name in model.tensors:
        tied_head = name == HEAD and model.config.tie_embeddings
        if name not in expected and not tied_head and not _HARMLESS.fullmatch(name):
            yield f"tensor {name} is unexpected"


def _target(dtype: str) -> np.dtype[Any]:
    if dtype not in DTYPES:
        raise UnsupportedModel(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}.")
    return DTYPES[dtype]


def _fill(model: ForeignModel, key: Key, leaf: Array) -> Iterator[int]:
    """Write each source tensor into its place in `leaf`; yields the bytes written."""
    for name, index in key.tensors(model.config):
        numbers = _finite(model, name)
        place = leaf[(*index, *key.at)]
        place[...] = (numbers.T if key.transposed else numbers).reshape(place.shape)
        yield place.nbytes


def _finite(model: ForeignModel, name: str) -> Array:
    numbers = model.tensors[name].read()
    if bad := numbers.size - int(np.count_nonzero(np.isfinite(numbers))):
        raise CheckpointError(
            f"{model.where}: tensor {name} holds {bad:,} numbers of {numbers.size:,} that are NaN or Inf."
        )
    return numbers
