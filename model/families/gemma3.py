"""The text of Gemma 3 (arXiv 2503.19786): Gemma 2 without soft caps, with norms on queries and keys, one layer in six
without a window, and another rope in those that have one.

Checkpoints of models that see images too are read without what they see with.
"""

from model.config import ModelConfig
from model.families.family import Family
from model.families.gemma2 import DEFAULTS, NORMS, gemma_fields
from model.hf_config import FULL, SLIDING, HfConfig
from model.keys import ATTENTION, EMBEDDINGS, MLP, QK_NORMS


def _read(config: HfConfig) -> ModelConfig:
    local = config.object("rope_parameters").object(SLIDING).number("rope_theta", above=0)
    every = min(config.count("sliding_window_pattern") or 6, config.num_layers + 1)
    return ModelConfig(
        **gemma_fields(config),
        qk_norm=True,
        windows=config.windows([SLIDING] * (every - 1) + [FULL], config.count("sliding_window")),
        local_rope_theta=local or config.number("rope_local_base_freq", above=0),
    )


FAMILY = Family(
    ("gemma3_text", "gemma3"),
    _read,
    (*EMBEDDINGS, *ATTENTION, *QK_NORMS, *MLP, *NORMS),
    {
        **DEFAULTS, "vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1e6,
        "rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6,
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
    },
    ignored=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
)  # fmt: skip
