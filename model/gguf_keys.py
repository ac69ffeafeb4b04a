"""What of a GGUF file's metadata may be ignored: a key of its architecture that is neither read nor known to be neutral
is refused by its name, for whoever ignores it may serve another model.

Names are those of llama.cpp's `gguf-py/gguf/constants.py`, without the architecture; 0 means unset to it in many.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from model.errors import UnsupportedModel
from model.fields import shown

READ = frozenset({
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
})  # fmt: skip
_EXPERTS = frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"})
_GEMMA = frozenset({"attention.sliding_window", "attention.sliding_window_pattern"})
_CAPS = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
READ_ALSO: Mapping[str, frozenset[str]] = {
    "llama": _EXPERTS,
    "qwen3moe": _EXPERTS,
    "gemma2": _GEMMA | _CAPS,
    "gemma3": _GEMMA | _CAPS | {"rope.freq_base_swa"},
}
"""Of one architecture only: what its family's config has."""

HARMLESS = frozenset({
    "rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "pooling_type", "embedding_length_out", "decoder_start_token_id",
})  # fmt: skip
"""Tell of the training, of other uses, or of a rope scaling that is refused by its type."""

_APPENDS = ("tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_sep_token")
"""Put a token behind every prompt, as models that only embed want it."""

Check = Callable[[Any, Mapping[str, Any]], bool]


def _is(*neutral: Any) -> Check:
    return lambda value, fields: value in neutral


def _is_head_dim(value: Any, fields: Mapping[str, Any]) -> bool:
    return bool(value == fields["head_dim"])


def _is_usual_scale(value: Any, fields: Mapping[str, Any]) -> bool:
    usual = fields["query_pre_attn_scalar"] ** -0.5
    return value == 0 or abs(value - usual) < 1e-6 * usual


def _reaches_all(value: Any, fields: Mapping[str, Any]) -> bool:
    return bool(value == 0 or value >= fields["max_position_embeddings"])


def _is_rope_base(value: Any, fields: Mapping[str, Any]) -> bool:
    base = fields["rope_parameters"]["rope_theta"]
    return bool(abs(value - base) < 1e-6 * base)


_UNSET = _is(0)
_UNSET_OR_ONE = _is(0, 1)
_NEUTRAL: Mapping[str, Check] = {
    "attention.sliding_window": _reaches_all,
    "attention.scale": _is_usual_scale,
    "attention.key_length_swa": _is_head_dim,
    "attention.value_length_swa": _is_head_dim,
    "rope.dimension_count_swa": _is_head_dim,
    "rope.freq_base_swa": _is_rope_base,
    "attention.causal": _is(True),
    "tensor_data_layout": _is("Meta AI original pth"),
    "expert_weights_norm": _is(True),
    "expert_gating_func": _UNSET_OR_ONE,  # none is said, or softmax
    "rope.scaling.yarn_ext_factor": _is(0, -1),
    "use_parallel_residual": _is(False),
    "swin_norm": _is(False),
    **dict.fromkeys((
        "logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale", "expert_group_scale",
        "attention.output_scale", "attention.temperature_scale", "rope.scaling.attn_factor", "rope.scaling.alpha",
        "rope.scaling.yarn_attn_factor", "interleave_moe_layer_step", "moe_every_n_layers", "expert_group_count",
        "expert_group_used_count",
    ), _UNSET_OR_ONE),
    **dict.fromkeys((
        "attention.clamp_kqv", "attention.max_alibi_bias", "attention.shared_kv_layers", "attention.temperature_length",
        "attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping", "expert_count",
        "expert_used_count", "expert_feed_forward_length", "expert_shared_count", "expert_shared_feed_forward_length",
        "leading_dense_block_count", "nextn_predict_layers", "n_deepstack_layers", "rope.scaling.yarn_log_multiplier",
        "embedding_length_per_layer_input", "full_attention_interval", "activation_sparsity_scale",
    ), _UNSET),
}  # fmt: skip


def check_keys(path: Path, fields: Mapping[str, Any], name: str, config: Mapping[str, Any]) -> None:
    """`fields` are those of the file, `name` its architecture, `config` what `model.gguf_config` made of them.

    Raises UnsupportedModel naming the first key that could change the model and is not read.
    """
    for key in _APPENDS:
        if fields.get(key):
            raise UnsupportedModel(
                f"{path}: {key} is true, but no token is put behind a prompt here; give the Hugging Face folder of the "
                "model, or a file without it."
            )
    read = READ | READ_ALSO.get(name, frozenset())
    for key, value in fields.items():
        part = key.removeprefix(f"{name}.")
        if part == key or part in read or part in HARMLESS:
            continue
        if part not in _NEUTRAL or not _is_neutral(part, value, config):
            raise UnsupportedModel(
                f"{path}: {key} is {shown(value)}, which may change what the model computes and is not read here; "
                "give the Hugging Face folder of the model, or a file without it."
            )


def _is_neutral(part: str, value: Any, config: Mapping[str, Any]) -> bool:
    """A list is one value for each layer."""
    if isinstance(value, list):
        return all(_is_neutral(part, each, config) for each in value)
    try:
        return _NEUTRAL[part](value, config)
    except TypeError:  # of a type that nobody writes
        return False
