"""Llama 2 and 3, SmolLM2, and whatever else calls itself `llama` (Touvron et al. 2023, arXiv 2302.13971)."""

from model.config import ModelConfig
from model.families.family import Family
from model.hf_config import HfConfig
from model.keys import ATTENTION, EMBEDDINGS, MLP, NORMS


def _read(config: HfConfig) -> ModelConfig:
    config.refuse("attention_bias", "mlp_bias")
    return ModelConfig(**config.shape())


FAMILY = Family(("llama",), _read, (*EMBEDDINGS, *ATTENTION, *MLP, *NORMS))
