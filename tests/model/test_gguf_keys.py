"""Metadata of GGUF files that change what a model computes: read, neutral, or refused by name."""

import pytest
from gguf import Keys

from model.config import LinearScaling
from model.errors import CheckpointError, UnsupportedModel
from model.gguf_file import read_gguf
from model.gguf_keys import HARMLESS, READ, READ_ALSO
from tests.model_files import write_tiny_gguf

KNOWN = [
    value.removeprefix("{arch}.")
    for group in vars(Keys).values()
    if isinstance(group, type)
    for value in vars(group).values()
    if isinstance(value, str) and value.startswith("{arch}.") and value.count("{") == 1
]
"""All that llama.cpp knows of."""
UNREAD = sorted({*KNOWN} - READ - HARMLESS - READ_ALSO["llama"])


def test_llama_cpp_knows_many():
    assert len(KNOWN) > 80 and "logit_scale" in UNREAD and "rope.scaling.type" not in UNREAD


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return lambda **changes: write_tiny_gguf(path, **changes)


def _with(key, value):
    return {f"llama.{key}".replace(".", "__"): value}


@pytest.mark.parametrize("key", UNREAD)
def test_no_key_that_is_not_read_passes_in_silence(write, key):
    """Of a value that means something; a window, the only one that may be too long to matter, is short."""
    with pytest.raises(UnsupportedModel, match=rf"llama\.{key} is 77, which may change what the model computes"):
        read_gguf(write(**_with(key, 77)))


@pytest.mark.parametrize("name", ["add_eos_token", "add_sep_token"])
def test_a_token_behind_every_prompt_is_refused(write, name):
    changes = {f"tokenizer__ggml__{name}": True}
    with pytest.raises(UnsupportedModel, match=rf"tokenizer\.ggml\.{name} is true, but no token is put behind"):
        read_gguf(write(**changes))
    read_gguf(write(**dict.fromkeys(changes, False)))


@pytest.mark.parametrize("value", ["x", ["x"], [0, 7]])
def test_values_of_any_type_are_refused(write, value):
    with pytest.raises(UnsupportedModel, match=r"llama\.attention\.clamp_kqv is"):
        read_gguf(write(**_with("attention.clamp_kqv", value)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scale_linear", 1.0), ("rope.scaling.type", "none"), ("rope.scaling.attn_factor", 1.0),
        ("rope.scaling.finetuned", False), ("attention.clamp_kqv", 0.0), ("logit_scale", 1.0), ("logit_scale", 0.0),
        ("residual_scale", 1.0), ("embedding_scale", 1.0), ("expert_count", 0), ("expert_used_count", 0),
        ("attention.scale", 0.0), ("attention.causal", True), ("attention.sliding_window", 100_000),
        ("attention.key_length_swa", 16), ("leading_dense_block_count", 0), ("final_logit_softcapping", 0.0),
        ("use_parallel_residual", False), ("tensor_data_layout", "Meta AI original pth"),
        ("attention.shared_kv_layers", [0, 0]),
    ],
)  # fmt: skip
def test_neutral_values_pass_and_change_nothing(write, key, value):
    expected = read_gguf(write()).config
    assert read_gguf(write(**_with(key, value))).config == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"rope.scale_linear": 4.0},
        {"rope.scaling.factor": 4.0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.type": "linear", "rope.scale_linear": 4.0},
    ],
)
def test_linear_scaling_in_all_its_spellings(write, changes):
    """llama.cpp takes a factor without a type for linear, and the old key where the new one is missing."""
    changes = {name: value for key, old in changes.items() for name, value in _with(key, old).items()}
    assert read_gguf(write(**changes)).config.rope_scaling == LinearScaling(4.0)


def test_a_factor_counts_for_nothing_where_the_type_is_none(write):
    changes = _with("rope.scaling.type", "none") | _with("rope.scaling.factor", 4.0)
    assert read_gguf(write(**changes)).config.rope_scaling is None


def test_the_sampling_that_the_file_recommends_is_read(write):
    sampling = {f"general__sampling__{name}": value for name, value in (("temp", 0.6), ("top_k", 20), ("top_p", 0.95))}
    found = read_gguf(write(**sampling)).generation
    assert (found.temperature, found.top_k, found.top_p) == (0.6, 20, 0.95)
    with pytest.raises(CheckpointError, match="temp must be a number of 0 or more, got 'hot'"):
        read_gguf(write(general__sampling__temp="hot"))
