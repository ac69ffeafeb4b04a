"""Mistral 7B and its kin: Llama with a sliding window in every layer (Jiang et al. 2023, arXiv 2310.06825).

Later releases set `sliding_window` to null; then it is Llama.
"""

from model.config import ModelConfig
from model.families.family import Family
from model.hf_config import SLIDING, HfConfig
from model.keys import ATTENTION, EMBEDDINGS, MLP, NORMS


def _read(config: HfConfig) -> ModelConfig:
    return ModelConfig(**config.shape(), windows=config.windows([SLIDING], config.count("sliding_window")))


FAMILY = Family(
    ("mistral",),
    _read,
    (*EMBEDDINGS, *ATTENTION, *MLP, *NORMS),
    {"num_key_value_heads": 8, "sliding_window": 4096},
)
