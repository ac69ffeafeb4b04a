import json

import pytest

from model.card import GenerationDefaults, ModelCard, TextAssets
from model.config import ModelConfig
from model.errors import CheckpointError


def card():
    text = TextAssets("{}", "plain", "<s>", "</s>", True, "tools", {"bos_token": "<s>", "pad_token": "<pad>"})
    generation = GenerationDefaults((1, 2), 0.5, 40, 0.9, 0.1, 1.1)
    return ModelCard("m", ModelConfig.tiny(), text, generation, "tests")


def test_a_card_survives_its_checkpoint():
    assert ModelCard.from_json(json.loads(json.dumps(card().to_json()))) == card()


def test_a_card_of_an_older_podstream_is_read():
    data = card().to_json()
    for section, names in {
        "text": ("tool_template", "named_tokens"),
        "generation": ("min_p", "repetition_penalty"),
    }.items():
        for name in names:
            del data[section][name]
    older = ModelCard.from_json(json.loads(json.dumps(data)))
    assert (older.text.tool_template, older.text.named_tokens, older.text.eos_token) == (None, {}, "</s>")
    assert older.generation == GenerationDefaults((1, 2), 0.5, 40, 0.9)


def test_what_is_no_card_is_refused():
    with pytest.raises(CheckpointError, match="has format 1, this version reads 2"):
        ModelCard.from_json({"format": 1})
    with pytest.raises(CheckpointError, match="incomplete"):
        ModelCard.from_json({**card().to_json(), "text": {"unheard_of": 1}})
