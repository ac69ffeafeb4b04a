"""Each family's logits equal those of Hugging Face transformers (`tests/golden/make_families.py`), and its config is
read wherever its fields stand."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model.config import LinearScaling, ModelConfig
from model.errors import CheckpointError, PodstreamError, UnsupportedModel
from model.families import read_config
from model.hf_folder import read_hf_folder
from tests.model.parity import FAMILIES, GOLDEN, golden_folder, worst_difference

ATOL = 2e-4  # float32 sums in another order
LLAMA = {
    "model_type": "llama", "vocab_size": 8, "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 8,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
GEMMA_4B = {  # all that the published config.json says of the text, but for its sizes
    "model_type": "gemma3", "eos_token_id": [1, 106],
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 7,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
}  # fmt: skip


def config_of(base=LLAMA, **changes):
    fields = {key: value for key, value in {**base, **changes}.items() if value is not ...}
    return read_config(fields)[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name, tmp_path):
    assert worst_difference(name, tmp_path) < ATOL


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_moe"])
def test_layers_apart_know_which_they_are(name, tmp_path):
    assert worst_difference(name, tmp_path, apart=True) < ATOL


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "gemma2", "qwen3_moe"])
def test_split_over_two_devices(name, tmp_path):
    assert worst_difference(name, tmp_path, tensor=2) < ATOL


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_survives_its_card(name):
    _, config = read_config(json.loads((GOLDEN / "families" / name / "config.json").read_text()))
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_fields_that_a_config_leaves_out_are_those_of_the_authors_code():
    config = config_of(GEMMA_4B)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.query_scale) == (8, 4, 256, 256.0)
    assert (config.vocab_size, config.max_seq_len, config.tie_embeddings) == (262_208, 131_072, True)
    assert config.windows == (1024,) * 5 + (None, 1024)
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
    assert config.rope_scaling == LinearScaling(8.0)
    assert (config.attention_softcap, config.logits_softcap, config.activation) == (None, None, "gelu_tanh")
    gemma2 = config_of({"model_type": "gemma2"}, num_hidden_layers=4)
    assert (gemma2.attention_softcap, gemma2.logits_softcap) == (50.0, 30.0)
    assert gemma2.windows == (4096, None, 4096, None)


def test_the_text_model_has_the_last_word_on_tied_embeddings():
    assert not config_of(GEMMA_4B, tie_word_embeddings=False).tie_embeddings
    text = {**GEMMA_4B["text_config"], "tie_word_embeddings": True}
    assert config_of(GEMMA_4B, tie_word_embeddings=False, text_config=text).tie_embeddings


def test_rope_is_read_in_its_old_and_its_new_form():
    old = config_of(GEMMA_4B)
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    text = {**GEMMA_4B["text_config"], "rope_scaling": None, "rope_parameters": ropes}
    assert config_of(GEMMA_4B, text_config=text) == old
    assert config_of(rope_theta=7.0) == config_of(rope_parameters={"rope_type": "default", "rope_theta": 7.0})


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, (16,) * 4),
        ({"model_type": "mistral"}, (4096,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "qwen2", "sliding_window": 16}, ()),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 4096)),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4}, ()),
    ],
)
def test_windows_are_where_the_config_says(changes, windows):
    config = config_of(num_key_value_heads=1, **changes)
    assert config.windows == windows
    assert config.window == (windows[0] if windows and None not in windows else None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; supported: llama, mistral"),
        ({"attention_bias": True}, "sets attention_bias"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; supported: silu"),
        ({"rope_scaling": {"type": "yarn"}}, "rope scaling 'yarn' is not supported; supported: llama3, linear"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling 'linear' lacks factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"vocab_size": ...}, "lacks vocab_size"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive whole number, got 0"),
        ({"num_hidden_layers": "four"}, "config.json: num_hidden_layers must be a positive whole number, got 'four'"),
        ({"model_type": "mistral", "num_hidden_layers": "four"}, "num_hidden_layers must be a positive whole number"),
        ({"model_type": "gemma2", "layer_types": ["sliding_attention"]}, "1 windows for 4 layers"),
        ({"model_type": "gemma2", "layer_types": ["chunked_attention"] * 4}, "layer_types 'chunked_attention' are not"),
        ({"model_type": "gemma2", "attn_logit_softcapping": "big"}, "attn_logit_softcapping must be a number"),
        ({"model_type": "gemma2", "attn_logit_softcapping": -1}, "attn_logit_softcapping must be positive, got -1"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "sets use_bidirectional_attention"),
        ({"model_type": "mistral", "sliding_window": 0, "num_key_value_heads": 1}, "sliding_window must be a positive"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9, "num_key_value_heads": 1}, "9 experts per token cannot"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [0]}, "layers without experts"),
    ],
)  # fmt: skip
def test_what_is_unknown_or_contradicts_itself_is_refused_in_a_sentence(changes, message):
    with pytest.raises(PodstreamError, match=message) as caught:
        config_of(**changes)
    assert isinstance(caught.value, UnsupportedModel | CheckpointError) and str(caught.value).endswith(".")


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_of_a_model_that_sees_images_is_read_alone(prefix, tmp_path):
    folder = golden_folder("gemma3_text", tmp_path)
    expected = read_hf_folder(folder)
    text = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "gemma3", "text_config": {**text, "eos_token_id": 5}, "eos_token_id": [1, 7]}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = load_file(folder / "model.safetensors")
    wrapped = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(wrapped | {"vision_tower.patch.weight": np.ones(3, np.float32)}, folder / "model.safetensors")
    model = read_hf_folder(folder)
    assert (model.config, model.tensors.keys()) == (expected.config, expected.tensors.keys())
    assert model.generation.eos_token_ids == (1, 7, 5), "the union of all places"
