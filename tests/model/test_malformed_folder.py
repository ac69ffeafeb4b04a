"""Whatever stands in the JSON files of a model folder, it is read, or refused in one sentence with the file's name."""

import copy
import json
import math
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from model.convert import check_tensors
from model.errors import CheckpointError, PodstreamError, UnsupportedModel
from model.hf_folder import INDEX, read_hf_folder
from serving.engine.tokenizer import Tokenizer
from tests.model.parity import FAMILIES, golden_folder
from tests.model_files import LLAMA3, TIED, tiny_tensors

ADDED = {"content": "<|tool|>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False,
         "special": False}  # fmt: skip
TEMPLATES = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
FILES = {
    "config.json": {},
    "generation_config.json": {
        "do_sample": True, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1,
        "eos_token_id": [1, 2], "no_repeat_ngram_size": 0,
    },
    "tokenizer_config.json": {
        "bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}, "extra_special_tokens": ["<|user|>"],
        "chat_template": TEMPLATES, "added_tokens_decoder": {"320": ADDED},
    },
    "special_tokens_map.json": {"pad_token": "<|end|>", "additional_special_tokens": ["<|user|>", {"content": "<x>"}]},
    "added_tokens.json": {"<|tool|>": 320},
    "chat_template.json": {"chat_template": "plain"},
    INDEX: {"metadata": {}, "weight_map": {}},
    "tokenizer.json": {},
}  # fmt: skip
NOT_BESIDE = ("special_tokens_map.json", "added_tokens.json", "chat_template.json")
"""They are not read where tokenizer_config.json says it all."""
OF_THE_FOLDER = ("does not fit its own config", "its config says", "weight files in")
"""What a sentence says that names the folder, since two of its files do not fit."""
SCALARS = st.sampled_from(
    [None, True, False, 0, 1, -1, 2, 7, 2**31, 10**18, 10**400, 0.5, -0.0, 1e-320, 1e308, math.nan, math.inf, "", "a",
     "default", "linear", "llama3", "full_attention", "../model.safetensors", "x" * 300, "\x00", "\ud800", "<|end|>"]
)  # fmt: skip
VALUES = SCALARS | st.sampled_from(
    [[], {}, [None], [[1]], [{}], ["a"], [1, 2], {"a": 1}, {"content": 5}, {"content": None}, [[]] * 3, {"1": {}},
     {"-1": ADDED}, {"320": ADDED}, {"rope_type": "linear"}, {"rope_type": "linear", "factor": 0}]
)  # fmt: skip
DAMAGE = st.sampled_from([b"\xff", b"\xef\xbb\xbf", b"[" * 5000, b"1" * 5000, b"\x00", b",", b"}", b'{"a":'])


def write_folder(folder):
    """Two shards, and every file that is read; gives what the JSON files say."""
    _, tensors = tiny_tensors()
    shutil.copytree(TIED, folder)
    (folder / "model.safetensors").unlink()
    (folder / "chat_template.jinja").unlink()
    shards = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(tensors)}
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == shard}, folder / shard)
    said = {name: dict(fields) for name, fields in FILES.items()}
    said["config.json"] = json.loads((TIED / "config.json").read_text()) | {
        "rope_scaling": json.loads((LLAMA3 / "config.json").read_text())["rope_parameters"], "text_config": {},
        "layer_types": ["full_attention"] * 2, "rope_parameters": {"full_attention": {"rope_theta": 5.0}},
        "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1, "sliding_window_pattern": 2,
        "partial_rotary_factor": 1.0,
    }  # fmt: skip
    said["tokenizer.json"] = json.loads((TIED / "tokenizer.json").read_text())
    said[INDEX]["weight_map"] = shards
    for name, fields in said.items():
        (folder / name).write_text(json.dumps(fields))
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("malformed") / "model"
    return path, write_folder(path)


def read(path):
    """All that loading asks of the files but numbers."""
    model = read_hf_folder(path)
    check_tensors(model)
    Tokenizer(model.text)
    return model


def check(path, changed):
    """Read, or refused in a sentence that names the file that was changed, or the folder whose tensors do not fit."""
    try:
        read(path)
    except (CheckpointError, UnsupportedModel) as error:
        said = str(error)
        said.encode()  # it can be printed
        assert said.endswith("."), said
        assert changed in said or any(words in said for words in OF_THE_FOLDER), said
        assert len(said) < 1000 and "Traceback" not in said


def places(value, path=()):
    """Paths of all nodes, but of a vocabulary only a few."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(items)[:12]:
        yield from places(child, (*path, key))


def put(value, path, new):
    """A copy of `value` with `new` at `path`, or without it if `new` is Ellipsis."""
    if not path:
        return new
    value = copy.copy(value)
    if new is ... and len(path) == 1:
        del value[path[0]]
    else:
        value[path[0]] = put(value[path[0]], path[1:], new)
    return value


@st.composite
def changes(draw, said):
    """One or two changes of one file's nodes."""
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(list(places(said))))
        if path == () and isinstance(said, dict) and draw(st.booleans()):
            said = {**said, draw(st.sampled_from(["chat_template", "eos_token_id", "a_token"])): draw(VALUES)}
        else:
            said = put(said, path, draw(VALUES | st.just(...) if path else VALUES))
    return said


@pytest.mark.parametrize("name", FILES)
@given(data=st.data())
@settings(
    max_examples=80, derandomize=True, database=None, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
def test_any_change_of_a_json_file_is_read_or_refused_in_a_sentence(name, folder, data):
    path, written = folder
    said = written
    if name == "config.json":
        said = {**said, name: said[name] | {"model_type": data.draw(st.sampled_from((*FAMILIES, "llama")))}}
    whole = json.dumps(said[name]).encode()
    match data.draw(st.sampled_from(["change"] * 6 + ["cut", "damage", "repeat"])):
        case "change":
            text = json.dumps(data.draw(changes(said[name]))).encode()
        case "cut":
            text = whole[: data.draw(st.integers(0, len(whole)))]
        case "damage":
            at = data.draw(st.integers(0, len(whole)))
            text = whole[:at] + data.draw(DAMAGE) + whole[at:]
        case "repeat":
            key, value = data.draw(st.sampled_from(list(said[name]))), data.draw(VALUES)
            text = whole[:-1] + f", {json.dumps(key)}: {json.dumps(value)}}}".encode()
    (path / name).write_bytes(text)
    if name in NOT_BESIDE:
        (path / "tokenizer_config.json").write_text("{}")
    try:
        check(path, name)
    finally:
        for each in (name, "tokenizer_config.json"):
            (path / each).write_text(json.dumps(written[each]))


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        (INDEX, {"weight_map": None}, "0 of 0 weight files"),
        (INDEX, {"weight_map": ["a"]}, r"weight_map must be an object, got \['a'\]"),
        (INDEX, {"weight_map": {"a": 5}}, "weight_map: a must be text, got 5"),
        (INDEX, {"weight_map": {"a": "../model.safetensors"}}, "weight_map must be names of files beside it"),
        ("tokenizer_config.json", {"chat_template": ["a"]}, r"chat_template must be a list of objects, got \['a'\]"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, "chat_template must be text, or a list"),
        ("tokenizer_config.json", {"eos_token": ["<|end|>"]}, "eos_token must be an object, got"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": ADDED}}, "'x' is not a token id"),
        ("added_tokens.json", {"<|tool|>": [1]}, r"<|tool|> must be a token id, got \[1\]"),
        ("config.json", {"eos_token_id": [[1]]}, r"eos_token_id must be a token id or a list of them, got \[\[1\]\]"),
        ("config.json", {"eos_token_id": True}, "eos_token_id must be a token id or a list of them, got True"),
        ("config.json", {"model_type": ["llama"]}, r"model_type must be text, got \['llama'\]"),
        ("config.json", {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor must be positive, got 0"),
        ("config.json", {"rope_scaling": [1]}, "rope_scaling must be an object"),
        ("config.json", {"rms_norm_eps": 10**400}, "rms_norm_eps must be a number"),
        ("config.json", {"rms_norm_eps": math.nan}, "rms_norm_eps must be a number, got nan"),
        ("config.json", {"num_hidden_layers": 10**12}, "num_hidden_layers must be at most 10,000"),
        ("config.json", {"text_config": 5}, "text_config must be an object"),
        ("generation_config.json", {"temperature": "hot", "do_sample": True}, "temperature must be a number"),
        ("generation_config.json", {"repetition_penalty": 0}, "repetition_penalty must be positive, got 0"),
    ],
)
def test_known_ones_are_named(name, change, sentence, tmp_path):
    said = write_folder(tmp_path / "model")
    if name == "added_tokens.json":
        (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    (tmp_path / "model" / name).write_text(json.dumps({**said[name], **change}))
    with pytest.raises(PodstreamError, match=rf"{name}.*{sentence}|{sentence} in {name}"):
        read(tmp_path / "model")


@pytest.mark.parametrize(
    "change", [{"rope_parameters": None}, {"text_config": None}, {"rope_scaling": {}}, {"layer_types": None}]
)
@pytest.mark.parametrize("family", ["gemma3_text", "mistral", "qwen3_moe"])
def test_null_is_as_if_it_were_not_there(family, change, tmp_path):
    path = golden_folder(family, tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **change}))
    said = read_hf_folder(path).config
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key not in change}))
    assert said == read_hf_folder(path).config
