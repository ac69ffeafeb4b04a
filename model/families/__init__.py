"""The families of models that the one decoder serves. A new one is a file here, a line in `FAMILIES` and a test.

llama     Llama 2 and 3, SmolLM2              qwen2       biases on query, key and value
mistral   sliding window                      qwen3       norms on queries and keys
mixtral   experts                             qwen3_moe   experts
gemma2    soft caps, windows, more norms      gemma3      windows, norms on queries and keys, two ropes
"""

from model.config import ModelConfig
from model.errors import CheckpointError, UnsupportedModel
from model.families import gemma2, gemma3, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from model.families.family import Family
from model.hf_config import HfConfig, Json, text_fields

FAMILIES = tuple(module.FAMILY for module in (llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma2, gemma3))


def read_config(config: Json) -> tuple[Family, ModelConfig]:
    """The family and the numbers of a `config.json`.

    Raises UnsupportedModel for an unknown architecture or feature, CheckpointError for missing or contradicting fields.
    """
    family = _family(config)
    try:
        return family, family.read(HfConfig(text_fields(config), family.defaults))
    except (TypeError, ValueError, AttributeError) as error:  # a field of a type that nobody writes
        raise CheckpointError(f"config.json is not understood: {error}.") from error


def _family(config: Json) -> Family:
    named = {name: family for family in FAMILIES for name in family.model_types}
    model_type = config.get("model_type")
    if model_type not in named:
        raise UnsupportedModel(f"model_type {model_type!r} is not supported; supported: {', '.join(named)}.")
    return named[model_type]
