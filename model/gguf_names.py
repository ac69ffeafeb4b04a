"""What GGUF calls the tensors of each architecture, and how it changes their numbers, as data.

Per-layer names are turned into those of Hugging Face's modules, which the family's key table understands.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_COMMON = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_TWO_NORMS = {"ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
EXPERT = "{expert}"


@dataclass(frozen=True, slots=True)
class Architecture:
    model_type: str
    """What `config.json` calls it."""
    layer_names: Mapping[str, str]
    """A name with `{expert}` is a stack of matrices, of which Hugging Face has one each."""
    is_interleaved: bool = False
    """Rows of q and k are interleaved per head, since its rope turns neighbouring pairs."""
    norm_offset: int = 0
    """Was added to the scales of all norms."""

    def hf_name(self, name: str) -> str:
        """A name that no table knows is passed on as it is, to be reported as unexpected."""
        if match := _LAYER.fullmatch(name):
            layer, part, kind = match.groups()
            return f"model.layers.{layer}.{self.layer_names[part]}.{kind}" if part in self.layer_names else name
        return _WHOLE.get(name, name)


def _experts(block: str, gate: str, up: str, down: str) -> dict[str, str]:
    parts = {"gate": gate, "up": up, "down": down}
    stacks = {f"ffn_{part}_exps": f"{block}.experts.{EXPERT}.{theirs}" for part, theirs in parts.items()}
    return {"ffn_gate_inp": f"{block}.gate", **stacks}


_DENSE = {**_COMMON, **_MLP, **_TWO_NORMS}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _DENSE, is_interleaved=True),
    "qwen2": Architecture("qwen2", _DENSE),
    "qwen3": Architecture("qwen3", _DENSE),
    "qwen3moe": Architecture(
        "qwen3_moe", {**_COMMON, **_TWO_NORMS, **_experts("mlp", "gate_proj", "up_proj", "down_proj")}
    ),
    "gemma2": Architecture("gemma2", {**_COMMON, **_MLP, **_FOUR_NORMS}, norm_offset=1),
    "gemma3": Architecture("gemma3_text", {**_COMMON, **_MLP, **_FOUR_NORMS}, norm_offset=1),
}
"""By `general.architecture`. Mistral calls itself llama there, and so does Mixtral, see below."""
MIXTRAL = Architecture(
    "mixtral", {**_COMMON, **_TWO_NORMS, **_experts("block_sparse_moe", "w1", "w3", "w2")}, is_interleaved=True
)
