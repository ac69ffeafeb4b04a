"""Qwen 3: queries and keys are normed, there are no biases (Yang et al. 2025, arXiv 2505.09388)."""

from model.config import ModelConfig
from model.families.family import Family
from model.families.qwen2 import windows
from model.hf_config import HfConfig
from model.keys import ATTENTION, EMBEDDINGS, MLP, NORMS, QK_NORMS


def _read(config: HfConfig) -> ModelConfig:
    config.refuse("attention_bias")
    return ModelConfig(**config.shape(), qk_norm=True, windows=windows(config))


FAMILY = Family(
    ("qwen3",),
    _read,
    (*EMBEDDINGS, *ATTENTION, *QK_NORMS, *MLP, *NORMS),
    {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
)
