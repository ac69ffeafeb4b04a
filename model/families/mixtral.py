"""Mixtral: Llama with a mixture of experts for an MLP (Jiang et al. 2024, arXiv 2401.04088)."""

from model.config import ModelConfig
from model.families.family import Family
from model.hf_config import SLIDING, HfConfig
from model.keys import ATTENTION, EMBEDDINGS, NORMS, experts


def _read(config: HfConfig) -> ModelConfig:
    return ModelConfig(
        **config.shape(),
        windows=config.windows([SLIDING], config.count("sliding_window")),
        num_experts=config.needed("num_local_experts"),
        experts_per_token=config.needed("num_experts_per_tok"),
    )


FAMILY = Family(
    ("mixtral",),
    _read,
    (*EMBEDDINGS, *ATTENTION, *experts("block_sparse_moe", gate="w1", up="w3", down="w2"), *NORMS),
    {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
    },
)
