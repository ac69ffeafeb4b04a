"""Qwen 2 and 2.5: Llama with biases on query, key and value (Yang et al. 2024, arXiv 2407.10671)."""

from model.config import ModelConfig
from model.families.family import Family
from model.hf_config import FULL, SLIDING, HfConfig
from model.keys import ATTENTION, EMBEDDINGS, MLP, NORMS, QKV_BIASES


def windows(config: HfConfig) -> tuple[int | None, ...]:
    """Only if `use_sliding_window` says so, and in layers from `max_window_layers` on."""
    if not config.flag("use_sliding_window"):
        return ()
    num_full = config.count("max_window_layers", least=0) or 0
    pattern = [FULL if layer < num_full else SLIDING for layer in range(config.num_layers)]
    return config.windows(pattern, config.count("sliding_window"))


def _read(config: HfConfig) -> ModelConfig:
    return ModelConfig(**config.shape(), qkv_bias=True, windows=windows(config))


FAMILY = Family(
    ("qwen2",),
    _read,
    (*EMBEDDINGS, *ATTENTION, *QKV_BIASES, *MLP, *NORMS),
    {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
)
