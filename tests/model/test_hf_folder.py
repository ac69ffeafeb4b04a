import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from model.convert import convert
from model.errors import CheckpointError, UnsupportedModel
from model.hf_folder import read_hf_folder
from tests.model_files import LLAMA3, TIED, tiny_tensors


@pytest.fixture
def folder(tmp_path):
    """A copy of the golden model with tied embeddings, to be spoiled."""
    return shutil.copytree(TIED, tmp_path / "model")


def _change(path, **changes):
    """Set keys of a JSON file; None removes."""
    data = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def _shard(folder, num_shards):
    """Spread the weights over several files with an index."""
    _, tensors = tiny_tensors()
    (folder / "model.safetensors").unlink()
    names = [f"model-{index + 1:05}-of-{num_shards:05}.safetensors" for index in range(num_shards)]
    weight_map = {name: names[index % num_shards] for index, name in enumerate(tensors)}
    for shard in names:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return names


def test_golden_models_are_read():
    model = read_hf_folder(LLAMA3)
    assert model.config.rope_scaling is not None and not model.config.tie_embeddings
    assert model.tensors["lm_head.weight"].shape == (320, 40)
    assert (model.text.bos_token, model.text.eos_token, model.text.add_bos) == ("<|begin|>", "<|end|>", False)
    assert "assistant" in (model.text.chat_template or "")
    assert (model.generation.eos_token_ids, model.dtype) == ((1,), "float32")


def test_sharded_weights_equal_one_file(folder):
    _, expected = tiny_tensors()
    _shard(folder, 3)
    tensors = read_hf_folder(folder).tensors
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(tensors[name].read(), tensor)


def test_missing_shards_are_counted_and_named(folder):
    names = _shard(folder, 3)
    (folder / names[1]).unlink()
    with pytest.raises(CheckpointError, match=f"1 of 3 weight files .* missing: {names[1]}"):
        read_hf_folder(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, 190_000])
def test_cut_weights_are_refused(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=rf"model\.safetensors \({keep:,} bytes\) is cut or corrupt"):
        read_hf_folder(folder)


def test_weights_that_vanish_after_opening_are_named(folder):
    model = read_hf_folder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight cannot be read"):
        model.tensors["model.norm.weight"].read()


def test_bfloat16_weights_stay_bfloat16(folder):
    _, tensors = tiny_tensors()
    save_file({n: t.astype(ml_dtypes.bfloat16) for n, t in tensors.items()}, folder / "model.safetensors")
    model = read_hf_folder(folder)
    assert model.dtype == "bfloat16"
    read = model.tensors["model.norm.weight"].read()
    np.testing.assert_array_equal(read, tensors["model.norm.weight"].astype(ml_dtypes.bfloat16))


def test_float16_weights_become_float32(folder):
    _, tensors = tiny_tensors()
    save_file({name: tensor.astype(np.float16) for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert read_hf_folder(folder).dtype == "float32"


def test_quantised_weights_are_refused_by_name(folder):
    save_file({"model.norm.weight": np.zeros(3, np.int8)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight has type I8"):
        read_hf_folder(folder)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("config.json", "lacks config.json"),
        ("tokenizer.json", "lacks tokenizer.json"),
        ("model.safetensors", "holds neither model.safetensors nor"),
    ],
)
def test_missing_files_are_named(folder, name, word):
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=word):
        read_hf_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe{}"])
def test_broken_json_is_named(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        read_hf_folder(folder)


def test_only_the_names_that_are_needed_are_optional(folder):
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").unlink()
    model = read_hf_folder(folder)
    assert model.text.chat_template is None and model.text.bos_token is None
    assert model.generation.eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "in_tokenizer", "expected"),
    [
        (1, 1, None, (1,)), (1, [2, 1], None, (1, 2)), ([5, 6], None, None, (5, 6)), (None, 7, None, (7,)),
        (None, None, None, ()), (None, None, "<|end|>", (1,)), (5, [6, 5], "<|user|>", (5, 6, 2)),
        (None, None, {"content": "<|end|>"}, (1,)), (None, 7, "<|nobody|>", (7,)), (999, None, "<|end|>", (1,)),
    ],
)  # fmt: skip
def test_end_tokens_are_the_union_of_all_that_the_folder_names(
    folder, in_config, in_generation, in_tokenizer, expected
):
    _change(folder / "config.json", eos_token_id=in_config)
    _change(folder / "generation_config.json", eos_token_id=in_generation)
    _change(folder / "tokenizer_config.json", eos_token=in_tokenizer)
    model = read_hf_folder(folder)
    assert model.generation.eos_token_ids == expected
    assert any("no end token" in note for note in model.notes) == (not expected)


def test_sampling_advice_counts_only_when_sampling_but_a_repetition_penalty_always(folder):
    advice = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.05, "repetition_penalty": 1.1}
    _change(folder / "generation_config.json", **advice)
    generation = read_hf_folder(folder).generation
    assert (generation.temperature, generation.min_p, generation.repetition_penalty) == (None, None, 1.1)
    _change(folder / "generation_config.json", do_sample=True)
    generation = read_hf_folder(folder).generation
    assert {name: getattr(generation, name) for name in advice} == advice


def test_advice_that_is_not_followed_is_noted(folder):
    neutral = {"num_beams": 1, "no_repeat_ngram_size": 0, "suppress_tokens": [], "typical_p": 1.0, "min_length": 0}
    _change(folder / "generation_config.json", max_new_tokens=5, **neutral)
    assert read_hf_folder(folder).notes == ()
    _change(folder / "generation_config.json", no_repeat_ngram_size=3, suppress_tokens=[4])
    notes = read_hf_folder(folder).notes
    assert [note.split(": ")[1] for note in notes] == [
        "no_repeat_ngram_size is not followed", "suppress_tokens is not followed"
    ]  # fmt: skip


def test_an_added_token_of_another_id_than_its_file_says_is_noted(folder):
    _change(folder / "tokenizer_config.json", added_tokens_decoder={"500": {"content": "<|tool|>", "special": True}})
    assert read_hf_folder(folder).notes == (f"{folder}: the added token '<|tool|>' is said to be 500, but is 320",)


def test_an_own_head_is_used_though_the_config_ties_it_and_a_copy_stays_tied(folder):
    """huggingface/transformers#42612"""
    _, tensors = tiny_tensors()
    embed = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embed.copy()}, folder / "model.safetensors")
    assert read_hf_folder(folder).config.tie_embeddings and not read_hf_folder(folder).notes
    own = embed.copy()
    own[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": own}, folder / "model.safetensors")
    model = read_hf_folder(folder)
    assert not model.config.tie_embeddings and "lm_head.weight differs" in model.notes[0]
    np.testing.assert_array_equal(convert(model)["head"]["kernel"], own.T)
    save_file(tensors | {"lm_head.weight": own[:-1]}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape \[319, 40\], expected \[320, 40\]"):
        read_hf_folder(folder)


def test_where_only_the_head_of_tied_weights_was_saved_it_is_the_token_vectors(folder):
    _, tensors = tiny_tensors()
    expected = convert(read_hf_folder(folder))
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors")
    np.testing.assert_array_equal(convert(read_hf_folder(folder))["embed"]["embedding"], expected["embed"]["embedding"])


def test_a_few_float32_norms_do_not_double_the_memory_unsaid(folder):
    _, tensors = tiny_tensors()
    small = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    norm = "model.norm.weight"
    save_file(small | {norm: tensors[norm]}, folder / "model.safetensors")
    model = read_hf_folder(folder)
    assert model.dtype == "bfloat16"
    assert model.notes[0].endswith("160 bytes of float32 are rounded (--dtype float32 keeps them, in twice the memory)")
    assert convert(model)["final_norm"]["scale"].dtype == ml_dtypes.bfloat16
    save_file(tensors | {norm: small[norm]}, folder / "model.safetensors")
    assert (read_hf_folder(folder).dtype, read_hf_folder(folder).notes) == ("float32", ())


def test_the_template_file_wins_over_the_config(folder):
    _change(folder / "tokenizer_config.json", chat_template="from config")
    (folder / "chat_template.jinja").write_text("from file")
    assert read_hf_folder(folder).text.chat_template == "from file"
    (folder / "chat_template.jinja").unlink()
    assert read_hf_folder(folder).text.chat_template == "from config"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    _change(folder / "tokenizer_config.json", chat_template=named)
    assert read_hf_folder(folder).text.chat_template == "plain"


def test_bos_is_added_when_the_tokenizer_itself_does(folder):
    bos = {"SpecialToken": {"id": "<|begin|>", "type_id": 0}}
    processor = {
        "type": "TemplateProcessing", "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [0], "tokens": ["<|begin|>"]}},
    }  # fmt: skip
    _change(folder / "tokenizer.json", post_processor=processor)
    _change(folder / "tokenizer_config.json", bos_token={"content": "<|begin|>"}, add_bos_token=False)
    text = read_hf_folder(folder).text
    assert (text.bos_token, text.add_bos) == ("<|begin|>", True)


def test_other_architecture_is_named(folder):
    _change(folder / "config.json", model_type="mamba")
    with pytest.raises(UnsupportedModel, match="'mamba'"):
        read_hf_folder(folder)
