"""Gemma 2 (arXiv 2408.00118): soft caps on scores and logits, norms before and after attention and MLP, a window in
every second layer, norm scales stored as their difference from 1, token vectors scaled by the root of their width."""

from typing import Any

from model.config import ModelConfig
from model.families.family import Family
from model.hf_config import FULL, SLIDING, HfConfig
from model.keys import ATTENTION, EMBEDDINGS, MLP, norm

NORMS = (
    norm("input_layernorm.weight", "attention_norm"),
    norm("post_attention_layernorm.weight", "attention_out_norm"),
    norm("pre_feedforward_layernorm.weight", "mlp_norm"),
    norm("post_feedforward_layernorm.weight", "mlp_out_norm"),
)
DEFAULTS = {
    "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "eos_token_id": 1,
}  # fmt: skip


def gemma_fields(config: HfConfig) -> dict[str, Any]:
    """Fields of ModelConfig that Gemma 2 and 3 share."""
    config.refuse("attention_bias", "use_bidirectional_attention")
    return {
        **config.shape(activation="hidden_activation"),
        "query_scale": config.number("query_pre_attn_scalar", above=0),
        "attention_softcap": config.number("attn_logit_softcapping", above=0),
        "logits_softcap": config.number("final_logit_softcapping", above=0),
        "sandwich_norms": True,
        "norm_offset": 1.0,
        "scale_embeddings": True,
    }


def _read(config: HfConfig) -> ModelConfig:
    return ModelConfig(**gemma_fields(config), windows=config.windows([SLIDING, FULL], config.count("sliding_window")))


FAMILY = Family(("gemma2",), _read, (*EMBEDDINGS, *ATTENTION, *MLP, *NORMS), DEFAULTS)
