"""The families of models that the one decoder serves. A new one is a file here, a line in `FAMILIES` and a test.

llama     Llama 2 and 3, SmolLM2              qwen2       biases on query, key and value
mistral   sliding window                      qwen3       norms on queries and keys
mixtral   experts                             qwen3_moe   experts
gemma2    soft caps, windows, more norms      gemma3      windows, norms on queries and keys, two ropes
"""

from model.config import InconsistentConfig, ModelConfig
from model.errors import CheckpointError, UnsupportedModel
from model.families import gemma2, gemma3, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from model.families.family import Family
from model.fields import Fields, Json, shown
from model.hf_config import HfConfig, text_fields

FAMILIES = tuple(module.FAMILY for module in (llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma2, gemma3))


def read_config(config: Json, where: str = "config.json") -> tuple[Family, ModelConfig]:
    """The family and the numbers of a `config.json`, which messages call `where`.

    Raises UnsupportedModel for an unknown architecture or feature, CheckpointError for missing or contradicting fields.
    """
    family = _family(Fields(config, where))
    try:
        return family, family.read(HfConfig(text_fields(config, where), family.defaults, where))
    except InconsistentConfig as error:
        raise CheckpointError(f"{where} contradicts itself: {error}") from error


def _family(config: Fields) -> Family:
    named = {name: family for family in FAMILIES for name in family.model_types}
    model_type = config.text("model_type")
    if model_type not in named:
        raise UnsupportedModel(
            f"{config.where}: model_type {shown(model_type)} is not supported; supported: {', '.join(named)}."
        )
    return named[model_type]
