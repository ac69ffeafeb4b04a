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
from dataclasses import dataclass, field
from itertools import product
from math import prod

from model.config import ModelConfig
from model.errors import CheckpointError
from model.tree import Names

HEAD_PATH = ("head", "kernel")
LAYER, EXPERT = "{layer}", "{expert}"
_LEADING = {"L": LAYER, "Z": EXPERT}


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor and its place in a leaf."""

    name: str
    at: tuple[int | slice, ...]
    """For each axis of the leaf."""


@dataclass(frozen=True, slots=True)
class Key:
    """Letters are the dimensions of `model.axes`, and `R` the query heads of a KV head; `NH` together is a flattened
    pair. The leading axes of a leaf, layers and experts, stand in `theirs` where one tensor holds all of them."""

    source: str
    """Their name, with `{layer}` and `{expert}` where there is one tensor for each."""
    theirs: tuple[str, ...]
    path: Names
    ours: str
    """Dimensions of the tensor once it lies in the leaf, without the leading ones."""
    at: tuple[int | slice, ...] = ()
    """Its place within the leaf (of one layer, of one expert), if it is a part of it."""
    leaf: str | None = None
    """Dimensions of the leaf (of one layer), if several tensors make it."""
    layers: slice = field(default_factory=lambda: slice(None))
    """The layers that its tensors are about."""
    times: float = 1.0
    """What its numbers are multiplied by."""
    is_interleaved: bool = False
    """Whether rope turns neighbours of a head, and not its two halves."""
    may_be_longer: bool = False
    """Whether there may be more rows for tokens than tokens; what lies behind is padding."""

    @property
    def leading(self) -> str:
        """The leading axes of its leaf."""
        return ("L" if self.path[0] == "layers" else "") + ("Z" if (self.leaf or "").startswith("Z") else "")

    @property
    def stacked(self) -> str:
        """The leading axes that a tensor has itself."""
        return "".join(letter for letter in self.leading if _LEADING[letter] not in self.source)

    @property
    def is_head(self) -> bool:
        return self.path == HEAD_PATH

    def leaf_shape(self, config: ModelConfig) -> tuple[int, ...]:
        letters = self.leaf or self.ours
        return letter_sizes(config, "L" + letters if "L" in self.leading else letters)

    def tensor_shape(self, config: ModelConfig) -> tuple[int, ...]:
        return tuple(prod(self.sizes(config, letters)) for letters in self.theirs)

    def sizes(self, config: ModelConfig, letters: str) -> tuple[int, ...]:
        """Of one tensor's dimensions."""
        layers = len(range(config.num_layers)[self.layers])
        return tuple(
            layers if letter == "L" else size
            for letter, size in zip(letters, letter_sizes(config, letters), strict=True)
        )

    def atoms(self, letters: str) -> str:
        """`N` is two dimensions where queries lie by KV head."""
        return letters.replace("N", "KR") if "R" in self.ours else letters

    def parts(self, config: ModelConfig) -> Iterator[Part]:
        layers, experts = range(config.num_layers)[self.layers], range(config.num_experts)
        rest = len(self.leaf_shape(config)) - len(self.leading) - len(self.at)
        numbered: dict[str, list[tuple[int | None, int | slice]]] = {
            "L": list(enumerate(layers)), "Z": list(enumerate(experts))
        }  # fmt: skip
        whole: dict[str, int | slice] = {"L": self.layers, "Z": slice(None)}
        choices = [[(None, whole[axis])] if axis in self.stacked else numbered[axis] for axis in self.leading]
        for chosen in product(*choices):
            name = self.source
            for axis, (number, _) in zip(self.leading, chosen, strict=True):
                name = name.replace(_LEADING[axis], str(number))
            yield Part(name, (*(place for _, place in chosen), *self.at, *[slice(None)] * rest))


def letter_sizes(config: ModelConfig, letters: str) -> tuple[int, ...]:
    """How long the axes are that these letters name."""
    heads_per_group = config.num_heads // config.num_kv_heads
    sizes = {
        "L": config.num_layers, "V": config.vocab_size, "D": config.embed_dim, "F": config.mlp_dim,
        "N": config.num_heads, "K": config.num_kv_heads, "H": config.head_dim, "Z": config.num_experts,
        "R": heads_per_group, "A": heads_per_group + 2, "C": 2,
    }  # fmt: skip
    return tuple(sizes[letter] for letter in letters)


_ALL, _QUERIES, _KEY, _VALUE, _PAIR = slice(None), slice(None, -2), -2, -1, slice(-2, None)
_QKV, _BIAS, _MLP = ("layers", "attention", "qkv"), ("layers", "attention", "qkv_bias"), ("layers", "mlp")

TARGETS: dict[str, tuple[Names, str, tuple[int | slice, ...], str | None]] = {
    "embed": (("embed", "embedding"), "VD", (), None),
    "head": (HEAD_PATH, "DV", (), None),
    "final_norm": (("final_norm", "scale"), "D", (), None),
    "attention_norm": (("layers", "attention_norm", "scale"), "D", (), None),
    "qkv": (_QKV, "DKAH", (), None),
    "q": (_QKV, "DKRH", (_ALL, _ALL, _QUERIES), "DKAH"),
    "k": (_QKV, "DKH", (_ALL, _ALL, _KEY), "DKAH"),
    "v": (_QKV, "DKH", (_ALL, _ALL, _VALUE), "DKAH"),
    "kv": (_QKV, "DKCH", (_ALL, _ALL, _PAIR), "DKAH"),
    "q_bias": (_BIAS, "KRH", (_ALL, _QUERIES), "KAH"),
    "k_bias": (_BIAS, "KH", (_ALL, _KEY), "KAH"),
    "v_bias": (_BIAS, "KH", (_ALL, _VALUE), "KAH"),
    "q_norm": (("layers", "attention", "q_norm", "scale"), "H", (), None),
    "k_norm": (("layers", "attention", "k_norm", "scale"), "H", (), None),
    "out": (("layers", "attention", "out"), "NHD", (), None),
    "attention_out_norm": (("layers", "attention_out_norm", "scale"), "D", (), None),
    "mlp_norm": (("layers", "mlp_norm", "scale"), "D", (), None),
    "gate": ((*_MLP, "gate_up"), "DF", (_ALL, 0), "DCF"),
    "up": ((*_MLP, "gate_up"), "DF", (_ALL, 1), "DCF"),
    "gate_up": ((*_MLP, "gate_up"), "DCF", (), None),
    "down": ((*_MLP, "down"), "FD", (), None),
    "router": ((*_MLP, "router"), "DZ", (), None),
    "mlp_out_norm": (("layers", "mlp_out_norm", "scale"), "D", (), None),
}
"""What a key table can speak of: the leaf, the tensor's dimensions in it, its place, and the leaf's dimensions. `kv` is
key and value of each KV head in one tensor, `gate_up` both matrices of a gated MLP, in this order."""


def key(target: str, source: str, dims: str, **changes: object) -> Key:
    """The row for one of `TARGETS`. `dims` are those of the tensor, with spaces between its axes, e.g. `NH D`.

    Raises CheckpointError when there is no such target, or it has other dimensions.
    """
    if target not in TARGETS:
        raise CheckpointError(f"key table: {target!r} is not one of {', '.join(TARGETS)}.")
    path, ours, at, leaf = TARGETS[target]
    theirs = tuple(dims.split())
    if path[:2] == _MLP and target != "router" and ("Z" in theirs or EXPERT in source):
        leaf = "Z" + (leaf or ours)
    made = Key(source, theirs, path, ours, at, leaf, **changes)  # type: ignore[arg-type]
    wanted, found = made.stacked + made.ours, made.atoms("".join(theirs))
    if sorted(wanted) != sorted(found):
        raise CheckpointError(
            f"key table: {target} has dimensions {' '.join(wanted.replace('KR', 'N'))}, but {source} has {dims}."
        )
    return made


IN_LAYER = "model.layers.{layer}."


def norm(source: str, name: str) -> Key:
    """A norm over the embedding in every layer."""
    return key(name, IN_LAYER + source, "D")


EMBEDDINGS = (
    key("embed", "model.embed_tokens.weight", "V D"),
    key("head", "lm_head.weight", "V D"),
    key("final_norm", "model.norm.weight", "D"),
)
ATTENTION = (
    key("q", IN_LAYER + "self_attn.q_proj.weight", "NH D"),
    key("k", IN_LAYER + "self_attn.k_proj.weight", "KH D"),
    key("v", IN_LAYER + "self_attn.v_proj.weight", "KH D"),
    key("out", IN_LAYER + "self_attn.o_proj.weight", "D NH"),
)
QKV_BIASES = (
    key("q_bias", IN_LAYER + "self_attn.q_proj.bias", "NH"),
    key("k_bias", IN_LAYER + "self_attn.k_proj.bias", "KH"),
    key("v_bias", IN_LAYER + "self_attn.v_proj.bias", "KH"),
)
QK_NORMS = (
    key("q_norm", IN_LAYER + "self_attn.q_norm.weight", "H"),
    key("k_norm", IN_LAYER + "self_attn.k_norm.weight", "H"),
)
MLP = (
    key("gate", IN_LAYER + "mlp.gate_proj.weight", "F D"),
    key("up", IN_LAYER + "mlp.up_proj.weight", "F D"),
    key("down", IN_LAYER + "mlp.down_proj.weight", "D F"),
)
NORMS = (
    norm("input_layernorm.weight", "attention_norm"),
    norm("post_attention_layernorm.weight", "mlp_norm"),
)


def experts(block: str, gate: str, up: str, down: str) -> tuple[Key, ...]:
    """A mixture of experts in the module `block` of a layer, with these names for an expert's matrices."""
    expert = f"{IN_LAYER}{block}.experts.{{expert}}."
    return (
        key("router", f"{IN_LAYER}{block}.gate.weight", "Z D"),
        key("gate", f"{expert}{gate}.weight", "F D"),
        key("up", f"{expert}{up}.weight", "F D"),
        key("down", f"{expert}{down}.weight", "D F"),
    )
