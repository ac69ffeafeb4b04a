"""The sizes of a model, told by the shapes of its tensors, for configs that do not say them."""

import re
from collections.abc import Mapping, Sequence

from model.foreign import LazyTensor
from model.keys import EXPERT, LAYER, Key

_FIELDS = {
    "V": ("vocab_size",), "D": ("hidden_size",), "N": ("num_attention_heads",), "K": ("num_key_value_heads",),
    "H": ("head_dim",), "L": ("num_hidden_layers",), "F": ("intermediate_size", "moe_intermediate_size"),
    "Z": ("num_local_experts", "num_experts"),
}  # fmt: skip


def sizes_of(keys: Sequence[Key], tensors: Mapping[str, LazyTensor]) -> dict[str, int]:
    """As fields of a `config.json`. What is flattened or shared out among tensors tells nothing."""
    sizes: dict[str, int] = {}
    for key in keys:
        is_of_all = key.layers == slice(None)
        pattern = re.compile(
            re.escape(key.source).replace(re.escape(LAYER), r"(\d+)").replace(re.escape(EXPERT), r"\d+")
        )
        found = [match for match in map(pattern.fullmatch, tensors) if match]
        if not found:
            continue
        shape = tensors[found[0][0]].shape
        if len(shape) == len(key.theirs):
            sizes |= {
                letter: size for letter, size in zip(key.theirs, shape, strict=True) if letter != "L" or is_of_all
            }
        if LAYER in key.source and is_of_all:
            sizes["L"] = max(int(match[1]) for match in found) + 1
    return {field: size for letter, size in sizes.items() for field in _FIELDS.get(letter, ())}
