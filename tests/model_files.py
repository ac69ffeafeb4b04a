"""Small models written in the formats that others write: GGUF files and Hugging Face folders."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Quant
from gguf import GGUFWriter

from model.config import ModelConfig
from model.foreign import ForeignModel
from model.hf_folder import read_hf_folder

GOLDEN = Path(__file__).parent / "golden"
TIED, LLAMA3 = GOLDEN / "tiny_tied", GOLDEN / "tiny_llama3"

GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def tiny_tensors(folder: Path = TIED) -> tuple[ForeignModel, dict[str, np.ndarray]]:
    """A golden model and its tensors under Hugging Face's names."""
    model = read_hf_folder(folder)
    return model, {name: tensor.read() for name, tensor in model.tensors.items()}


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The order of q and k rows in a GGUF file, written as an index: half `h`, row `r` of a head goes to `2 r + h`."""
    rows = weight.shape[0] // num_heads
    out = np.empty_like(weight)
    for head in range(num_heads):
        for row in range(rows):
            half, pair = divmod(row, rows // 2)
            out[head * rows + 2 * pair + half] = weight[head * rows + row]
    return out


def gguf_name(name: str) -> str:
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}.weight"


def tiny_fields(model: ForeignModel) -> dict[str, object]:
    """The metadata that a converter would write for a golden model."""
    config = model.config
    tokenizer = json.loads(model.text.tokenizer_json)
    vocab = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "llama.block_count": config.num_layers, "llama.context_length": config.max_seq_len,
        "llama.embedding_length": config.embed_dim, "llama.feed_forward_length": config.mlp_dim,
        "llama.attention.head_count": config.num_heads, "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.key_length": config.head_dim, "llama.attention.value_length": config.head_dim,
        "llama.rope.dimension_count": config.head_dim, "llama.vocab_size": config.vocab_size,
        "llama.rope.freq_base": config.rope_theta, "llama.attention.layer_norm_rms_epsilon": config.norm_eps,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<|begin|>"], "tokenizer.ggml.eos_token_id": vocab["<|end|>"],
        "tokenizer.chat_template": model.text.chat_template,
    }  # fmt: skip


ARCHITECTURES = {
    "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "mixtral": "llama", "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}  # fmt: skip
"""What GGUF calls the golden families; Mistral is a llama without its window there."""
_QWEN_NAMES = {**GGUF_NAMES, "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_EXPERT_NAMES = {
    "block_sparse_moe.gate": "ffn_gate_inp", "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
    "mlp.gate": "ffn_gate_inp", "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
}  # fmt: skip
_GEMMA_NAMES = {
    **_QWEN_NAMES, "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def write_family_gguf(path: Path, name: str, model: ForeignModel, tensors: Mapping[str, np.ndarray]) -> Path:
    """A golden family as llama.cpp's converter would write it; its tokenizer is that of another golden model."""
    config, architecture = model.config, ARCHITECTURES[name]
    fields = {key.replace("llama.", f"{architecture}."): value for key, value in tiny_fields(model).items()}
    more = {
        "attention.sliding_window": next(iter(config.windows), None),
        "attention.sliding_window_pattern": [window is not None for window in config.windows] or None,
        "attn_logit_softcapping": config.attention_softcap, "final_logit_softcapping": config.logits_softcap,
        "expert_count": config.num_experts or None, "expert_used_count": config.experts_per_token or None,
        "expert_feed_forward_length": config.mlp_dim if name == "qwen3_moe" else None,
        "rope.scaling.type": "linear" if config.rope_scaling else None,
        "rope.scaling.factor": config.rope_scaling.factor if config.rope_scaling else None,
    }  # fmt: skip
    fields |= {f"{architecture}.{key}": value for key, value in more.items()}
    fields = {key: value for key, value in fields.items() if value is not None}
    return write_gguf(path, fields, _family_tensors(name, config, tensors), architecture=architecture)


def _family_tensors(name: str, config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = _GEMMA_NAMES if name.startswith("gemma") else _QWEN_NAMES
    out: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for theirs, tensor in tensors.items():
        if theirs in names:
            out[names[theirs]] = tensor + (name.startswith("gemma") and "norm" in theirs)
            continue
        _, _, layer, rest = theirs.split(".", 3)
        part, _, kind = rest.rpartition(".")
        if "experts" in part:  # they come in the order of their numbers
            stacks.setdefault(f"blk.{layer}.{_EXPERT_NAMES[part.split('.')[-1]]}.weight", []).append(tensor)
        elif config.num_experts and part in _EXPERT_NAMES:
            out[f"blk.{layer}.{_EXPERT_NAMES[part]}.weight"] = tensor
        else:
            heads = {"self_attn.q_proj": config.num_heads, "self_attn.k_proj": config.num_kv_heads}.get(part)
            if name == "mixtral" and heads:
                tensor = permute(tensor, heads)
            out[f"blk.{layer}.{names[part]}.{kind}"] = tensor + (name.startswith("gemma") and part.endswith("norm"))
    return out | {key: np.stack(parts) for key, parts in stacks.items()}


def write_gguf(
    path: Path, fields: Mapping[str, object], tensors: Mapping[str, np.ndarray | tuple[np.ndarray, Quant]], *,
    architecture: str = "llama", max_tensors: int = 0,
) -> Path:  # fmt: skip
    """Fields by Python type (float -> 32 bits); a tensor may come as its quantised bytes `[rows, bytes]` and type. Of
    more than `max_tensors` the library makes several files."""
    writer = GGUFWriter(str(path), architecture, split_max_tensors=max_tensors)
    for key, value in fields.items():
        _add_field(writer, key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tiny_gguf(path: Path, **changes: object) -> Path:
    """The golden model with tied embeddings as a float32 GGUF file; `changes` replace fields (`__` for a dot)."""
    model, tensors = tiny_tensors()
    fields = tiny_fields(model) | {key.replace("__", "."): value for key, value in changes.items()}
    return write_gguf(path, {k: v for k, v in fields.items() if v is not None}, to_gguf(model, tensors))


def to_gguf(model: ForeignModel, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    heads = {"q_proj": model.config.num_heads, "k_proj": model.config.num_kv_heads}
    out = {}
    for name, tensor in tensors.items():
        count = next((count for part, count in heads.items() if part in name), None)
        out[gguf_name(name)] = permute(tensor, count) if count else tensor
    return out


def _add_field(writer: GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
