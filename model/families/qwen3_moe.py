"""Qwen 3 with a mixture of experts in every layer (arXiv 2505.09388)."""

from model.config import ModelConfig
from model.errors import UnsupportedModel
from model.families.family import Family
from model.hf_config import SLIDING, HfConfig
from model.keys import ATTENTION, EMBEDDINGS, NORMS, QK_NORMS, experts


def _windows(config: HfConfig) -> tuple[int | None, ...]:
    """In all layers if `use_sliding_window` says so: the authors' code does not look at `max_window_layers`."""
    return config.windows([SLIDING], config.count("sliding_window")) if config.flag("use_sliding_window") else ()


def _read(config: HfConfig) -> ModelConfig:
    config.refuse("attention_bias")
    if config.needed("decoder_sparse_step") != 1 or config.items("mlp_only_layers"):
        raise UnsupportedModel(
            f"{config.where} has layers without experts among those with them; all or none must have."
        )
    return ModelConfig(
        **{**config.shape(), "mlp_dim": config.needed("moe_intermediate_size")},
        qk_norm=True,
        windows=_windows(config),
        num_experts=config.count("num_experts") or config.count("num_local_experts") or 128,
        experts_per_token=config.needed("num_experts_per_tok"),
        norm_expert_shares=config.flag("norm_topk_prob"),
    )


FAMILY = Family(
    ("qwen3_moe",),
    _read,
    (*EMBEDDINGS, *ATTENTION, *QK_NORMS, *experts("mlp", "gate_proj", "up_proj", "down_proj"), *NORMS),
    {
        "num_key_value_heads": 4, "decoder_sparse_step": 1, "num_experts_per_tok": 8, "norm_topk_prob": False,
        "moe_intermediate_size": 768, "sliding_window": 4096,
    },
)  # fmt: skip
