"""Turns a ForeignModel's tensors into podstream's parameter tree: one table says what goes where.

    {"embed": {"embedding": VD},
     "layers": {"attention_norm": {"scale": LD},
                "attention": {"qkv": LDKAH, "out": LNHD},
                "mlp_norm": {"scale": LD},
                "mlp": {"gate_up": LDCF, "down": LFD}},
     "final_norm": {"scale": D},
     "head": {"kernel": DV}}                 # absent when the embeddings are tied

Hugging Face stores matrices `[out, in]` with heads flattened; here they are `[in, out]` with heads apart, what is
multiplied by the same input side by side, and the layers stacked in front, so that one scan runs over them.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from model.config import ModelConfig
from model.errors import CheckpointError, UnsupportedModel
from model.foreign import Array, ForeignModel, LazyTensor
from model.tree import Names, Params, put

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

DTYPES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
MAX_PROBLEMS = 3
HEAD = "lm_head.weight"
_HARMLESS = re.compile(r"(model\.layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class Key:
    """One row of the table: where a tensor of theirs lies in a leaf of ours.

    Letters are the dimensions of `model.axes`, and `R` the query heads of a KV head; `NH` together is a flattened pair.
    """

    source: str
    theirs: tuple[str, ...]
    path: Names
    ours: str
    """Dimensions of the tensor once it lies in the leaf; it is transposed if they come in another order."""
    at: tuple[int | slice, ...] = ()
    """Its place within the leaf (of one layer), if it is a part of it."""

    @property
    def transposed(self) -> bool:
        return self.theirs[0][0] != self.ours[0]


_ALL = slice(None)
QKV, GATE_UP = ("layers", "attention", "qkv"), ("layers", "mlp", "gate_up")
MERGED: Mapping[Names, str] = {QKV: "DKAH", GATE_UP: "DCF"}
"""Leaves that several tensors make."""
_IN_LAYER = "model.layers.{layer}."
KEYS = (
    Key("model.embed_tokens.weight", ("V", "D"), ("embed", "embedding"), "VD"),
    Key(HEAD, ("V", "D"), ("head", "kernel"), "DV"),
    Key(_IN_LAYER + "mlp.gate_proj.weight", ("F", "D"), GATE_UP, "DF", (_ALL, 0)),
    Key(_IN_LAYER + "mlp.up_proj.weight", ("F", "D"), GATE_UP, "DF", (_ALL, 1)),
    Key(_IN_LAYER + "mlp.down_proj.weight", ("D", "F"), ("layers", "mlp", "down"), "FD"),
    Key(_IN_LAYER + "self_attn.q_proj.weight", ("NH", "D"), QKV, "DKRH", (_ALL, _ALL, slice(None, -2))),
    Key(_IN_LAYER + "self_attn.k_proj.weight", ("KH", "D"), QKV, "DKH", (_ALL, _ALL, -2)),
    Key(_IN_LAYER + "self_attn.v_proj.weight", ("KH", "D"), QKV, "DKH", (_ALL, _ALL, -1)),
    Key(_IN_LAYER + "self_attn.o_proj.weight", ("D", "NH"), ("layers", "attention", "out"), "NHD"),
    Key(_IN_LAYER + "input_layernorm.weight", ("D",), ("layers", "attention_norm", "scale"), "D"),
    Key(_IN_LAYER + "post_attention_layernorm.weight", ("D",), ("layers", "mlp_norm", "scale"), "D"),
    Key("model.norm.weight", ("D",), ("final_norm", "scale"), "D"),
)


def expected_shapes(config: ModelConfig) -> Params:
    """The parameter tree of `config` with a shape tuple in place of each array."""
    tree: Params = {}
    for path, keys in _leaves(config):
        put(tree, path, _leaf_shape(config, keys))
    return tree


def check_tensors(model: ForeignModel) -> None:
    """Compare every name and shape with the config, reading no numbers.

    Raises one CheckpointError that names the first few tensors that are missing, misshapen or unexpected.
    """
    if model.config.num_layers > len(model.tensors):  # a damaged number must not become a list of billions of names
        raise CheckpointError(
            f"{model.where}: its config says {model.config.num_layers:,} layers, "
            f"but it holds only {len(model.tensors):,} tensors."
        )
    expected = dict(_expected_tensors(model.config))
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
    leaves = _leaves(model.config)
    total = sum(prod(_leaf_shape(model.config, keys)) for _, keys in leaves) * target.itemsize
    done = 0
    for path, keys in leaves:
        leaf = np.empty(_leaf_shape(model.config, keys), target)
        for key in keys:
            for num_bytes in _fill(model, key, leaf):
                done += num_bytes
                if on_progress is not None:
                    on_progress(done, total)
        yield path, leaf


def _leaves(config: ModelConfig) -> list[tuple[Names, list[Key]]]:
    """Every leaf of the tree, and the rows that fill it."""
    keys = [key for key in KEYS if not (key.source == HEAD and config.tie_embeddings)]
    return [(path, list(rows)) for path, rows in groupby(keys, key=lambda key: key.path)]


def _leaf_shape(config: ModelConfig, keys: list[Key]) -> tuple[int, ...]:
    letters = MERGED.get(keys[0].path, keys[0].ours)
    return _shape(config, "L" + letters if _is_stacked(keys[0]) else letters)


def _is_stacked(key: Key) -> bool:
    return key.path[0] == "layers"


def _shape(config: ModelConfig, letters: str) -> tuple[int, ...]:
    heads_per_group = config.num_heads // config.num_kv_heads
    sizes = {
        "L": config.num_layers, "V": config.vocab_size, "D": config.embed_dim, "F": config.mlp_dim,
        "N": config.num_heads, "K": config.num_kv_heads, "H": config.head_dim,
        "R": heads_per_group, "A": heads_per_group + 2, "C": 2,
    }  # fmt: skip
    return tuple(sizes[letter] for letter in letters)


def _sources(config: ModelConfig, key: Key) -> list[str]:
    """The tensors of one row, one per layer where layers are stacked."""
    return [key.source.format(layer=n) for n in range(config.num_layers)] if _is_stacked(key) else [key.source]


def _expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    for _, keys in _leaves(config):
        for key in keys:
            shape = tuple(prod(_shape(config, letters)) for letters in key.theirs)
            for name in _sources(config, key):
                yield name, shape


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
    layers = leaf if _is_stacked(key) else leaf[np.newaxis]
    for name, layer in zip(_sources(model.config, key), layers, strict=True):
        numbers = _finite(model, name)
        place = layer[key.at]
        place[...] = (numbers.T if key.transposed else numbers).reshape(place.shape)
        yield place.nbytes


def _finite(model: ForeignModel, name: str) -> Array:
    numbers = model.tensors[name].read()
    if bad := numbers.size - int(np.count_nonzero(np.isfinite(numbers))):
        raise CheckpointError(
            f"{model.where}: tensor {name} holds {bad:,} numbers of {numbers.size:,} that are NaN or Inf."
        )
    return numbers
