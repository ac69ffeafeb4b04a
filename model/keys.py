"""Key: one row of a key table, which says where a tensor of a foreign checkpoint lies in podstream's parameter tree.

    {"embed": {"embedding": VD},
     "layers": {"attention_norm": {"scale": LD},
                "attention": {"qkv": LDKAH, "out": LNHD},
                "mlp_norm": {"scale": LD},
                "mlp": {"gate_up": LDCF, "down": LFD}},
     "final_norm": {"scale": D},
     "head": {"kernel": DV}}                 # absent when the embeddings are tied

and where a family has them: `attention.qkv_bias` LKAH, `attention.q_norm.scale` and `k_norm.scale` LH, scales LD of
`attention_out_norm` and `mlp_out_norm`, and in `mlp` a `router` LDZ with experts `gate_up` LZDCF and `down` LZFD.

Hugging Face stores matrices `[out, in]` with heads flattened; here they are `[in, out]` with heads apart, what is
multiplied by the same input side by side, and the layers stacked in front, so that one scan runs over them.
The tables of this module are those that most families share.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from model.config import ModelConfig
from model.tree import Names

HEAD = "lm_head.weight"
_LAYER, _EXPERT = "{layer}", "{expert}"


@dataclass(frozen=True, slots=True)
class Key:
    """Letters are the dimensions of `model.axes`, and `R` the query heads of a KV head; `NH` together is a flattened
    pair."""

    source: str
    """Their name, with `{layer}` and `{expert}` where there is one tensor for each."""
    theirs: tuple[str, ...]
    path: Names
    ours: str
    """Dimensions of the tensor once it lies in the leaf; it is transposed if they come in another order."""
    at: tuple[int | slice, ...] = ()
    """Its place within the leaf (of one layer, of one expert), if it is a part of it."""
    leaf: str | None = None
    """Dimensions of the leaf (of one layer), if several tensors make it."""

    @property
    def transposed(self) -> bool:
        return self.theirs[0][0] != self.ours[0]

    def leaf_shape(self, config: ModelConfig) -> tuple[int, ...]:
        letters = self.leaf or self.ours
        return _shape(config, "L" + letters if _LAYER in self.source else letters)

    def tensor_shape(self, config: ModelConfig) -> tuple[int, ...]:
        return tuple(prod(_shape(config, letters)) for letters in self.theirs)

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The name of each tensor, and its layer and expert: where it lies on the leaf's first axes."""
        counts = {_LAYER: config.num_layers, _EXPERT: config.num_experts}
        stacked = [place for place in counts if place in self.source]
        for index in product(*(range(counts[place]) for place in stacked)):
            name = self.source
            for place, number in zip(stacked, index, strict=True):
                name = name.replace(place, str(number))
            yield name, index


def _shape(config: ModelConfig, letters: str) -> tuple[int, ...]:
    heads_per_group = config.num_heads // config.num_kv_heads
    sizes = {
        "L": config.num_layers, "V": config.vocab_size, "D": config.embed_dim, "F": config.mlp_dim,
        "N": config.num_heads, "K": config.num_kv_heads, "H": config.head_dim, "Z": config.num_experts,
        "R": heads_per_group, "A": heads_per_group + 2, "C": 2,
    }  # fmt: skip
    return tuple(sizes[letter] for letter in letters)


IN_LAYER = "model.layers.{layer}."
_ALL, _QUERIES, _KEY, _VALUE = slice(None), slice(None, -2), -2, -1
_MLP = ("layers", "mlp")


def norm(source: str, name: str) -> Key:
    """A norm over the embedding in every layer."""
    return Key(IN_LAYER + source, ("D",), ("layers", name, "scale"), "D")


EMBEDDINGS = (
    Key("model.embed_tokens.weight", ("V", "D"), ("embed", "embedding"), "VD"),
    Key(HEAD, ("V", "D"), ("head", "kernel"), "DV"),
    Key("model.norm.weight", ("D",), ("final_norm", "scale"), "D"),
)
_QKV = tuple(
    Key(f"{IN_LAYER}self_attn.{part}_proj.weight", (rows, "D"), ("layers", "attention", "qkv"), ours, at, "DKAH")
    for part, rows, ours, at in (
        ("q", "NH", "DKRH", (_ALL, _ALL, _QUERIES)),
        ("k", "KH", "DKH", (_ALL, _ALL, _KEY)),
        ("v", "KH", "DKH", (_ALL, _ALL, _VALUE)),
    )
)
ATTENTION = (*_QKV, Key(IN_LAYER + "self_attn.o_proj.weight", ("D", "NH"), ("layers", "attention", "out"), "NHD"))
QKV_BIASES = tuple(
    Key(f"{IN_LAYER}self_attn.{part}_proj.bias", (rows,), ("layers", "attention", "qkv_bias"), ours, at, "KAH")
    for part, rows, ours, at in (
        ("q", "NH", "KRH", (_ALL, _QUERIES)),
        ("k", "KH", "KH", (_ALL, _KEY)),
        ("v", "KH", "KH", (_ALL, _VALUE)),
    )
)
QK_NORMS = tuple(
    Key(f"{IN_LAYER}self_attn.{part}_norm.weight", ("H",), ("layers", "attention", f"{part}_norm", "scale"), "H")
    for part in "qk"
)
MLP = (
    Key(IN_LAYER + "mlp.gate_proj.weight", ("F", "D"), (*_MLP, "gate_up"), "DF", (_ALL, 0), "DCF"),
    Key(IN_LAYER + "mlp.up_proj.weight", ("F", "D"), (*_MLP, "gate_up"), "DF", (_ALL, 1), "DCF"),
    Key(IN_LAYER + "mlp.down_proj.weight", ("D", "F"), (*_MLP, "down"), "FD"),
)
NORMS = (
    norm("input_layernorm.weight", "attention_norm"),
    norm("post_attention_layernorm.weight", "mlp_norm"),
)


def experts(block: str, gate: str, up: str, down: str) -> tuple[Key, ...]:
    """A mixture of experts in the module `block` of a layer, with these names for an expert's matrices."""
    expert = f"{IN_LAYER}{block}.experts.{{expert}}."
    return (
        Key(f"{IN_LAYER}{block}.gate.weight", ("Z", "D"), (*_MLP, "router"), "DZ"),
        Key(f"{expert}{gate}.weight", ("F", "D"), (*_MLP, "gate_up"), "DF", (_ALL, 0), "ZDCF"),
        Key(f"{expert}{up}.weight", ("F", "D"), (*_MLP, "gate_up"), "DF", (_ALL, 1), "ZDCF"),
        Key(f"{expert}{down}.weight", ("D", "F"), (*_MLP, "down"), "FD", leaf="ZFD"),
    )
