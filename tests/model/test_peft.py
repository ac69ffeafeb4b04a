"""An adapter from PEFT is read whole and right, or refused in one sentence that names the tensor or field."""

import json
import os
import re

import ml_dtypes
import numpy as np
import pytest

from model.config import ModelConfig
from model.errors import CheckpointError, UnsupportedModel
from model.peft import CONFIG, WEIGHTS, NoSuchAdapter, adapter_arrays, read_adapter
from sharding.checkpoint import absolute
from tests.adapters import ATTENTION, random_tensors, save_adapter, tensor_name

MODEL = ModelConfig.tiny(num_heads=8, num_kv_heads=4)
MOE = ModelConfig.tiny(num_experts=4, experts_per_token=2)
QUERY = tensor_name(1, "q_proj", "A")


def read(folder, config=MODEL, max_rank=4):
    return read_adapter(absolute(folder), config, max_rank)


@pytest.fixture
def tensors():
    return random_tensors(MODEL, seed=1, rank=2)


@pytest.mark.parametrize(
    ("fields", "scale"), [({"lora_alpha": 6}, 3.0), ({"lora_alpha": 6, "use_rslora": True}, 6 / np.sqrt(2))], ids=str
)
def test_what_was_saved_is_read(tmp_path, tensors, fields, scale):
    adapter = read(save_adapter(tmp_path, tensors, **fields))
    assert (adapter.rank, adapter.scale) == (2, pytest.approx(scale))
    for layer in range(MODEL.num_layers):
        for number, matrix in enumerate("AB"):
            found = adapter.matrices[layer, "mlp.down_proj"][number]
            np.testing.assert_array_equal(found, tensors[tensor_name(layer, "down_proj", matrix)])


def test_a_file_url_and_all_that_peft_writes_beside_are_understood(tmp_path, tensors):
    beside = {
        "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "org/base", "fan_in_fan_out": False,
        "inference_mode": True, "init_lora_weights": True, "layer_replication": None, "loftq_config": {},
        "lora_bias": False, "lora_dropout": 0.1, "megatron_core": "megatron.core", "modules_to_save": None,
        "peft_version": "0.18.0", "qalora_group_size": 16, "rank_pattern": {}, "revision": None,
        "target_parameters": None, "task_type": "CAUSAL_LM", "use_dora": False, "use_qalora": False,
    }  # fmt: skip
    assert read(save_adapter(tmp_path, tensors, **beside)).matrices
    assert read(f"file://{tmp_path}").matrices


def test_half_floats_and_names_beside_a_vision_model_are_understood(tmp_path, tensors):
    renamed = {name.replace("model.layers", "language_model.layers"): tensor for name, tensor in tensors.items()}
    halves = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in renamed.items()}
    [found, _] = read(save_adapter(tmp_path, halves, target_modules="all-linear")).matrices[1, "self_attn.q_proj"]
    np.testing.assert_array_equal(found, tensors[QUERY].astype(ml_dtypes.bfloat16))


def test_a_lower_rank_and_what_is_not_adapted_are_zeros(tmp_path):
    tensors = random_tensors(MODEL, seed=1, rank=2, targets=("v_proj",))
    arrays = adapter_arrays(read(save_adapter(tmp_path, tensors)), MODEL, "bfloat16", rank=4)
    a, b = arrays["attention"]["qkv"].values()
    assert a.dtype == ml_dtypes.bfloat16
    assert a[..., -4:-2].all() and not a[..., -2:].any() and not a[..., :-4].any()
    assert b[:, -1, :2].all() and not b[:, :, 2:].any() and not b[:, :-1].any()
    assert not any(leaf.any() for leaf in arrays["mlp"]["down"].values())


def test_queries_that_a_training_library_scaled_are_adapted_at_their_scale(tmp_path):
    """MaxText keeps 1/sqrt(head_dim) in the weights, and the config says that scores are not divided."""
    adapter = read(save_adapter(tmp_path, random_tensors(MODEL, seed=1, rank=2, targets=("q_proj", "k_proj"))))
    folded = ModelConfig.tiny(num_heads=8, num_kv_heads=4, query_scale=1.0)
    plain, scaled = (
        adapter_arrays(adapter, config, "float32", 2)["attention"]["qkv"]["b"] for config in (MODEL, folded)
    )
    np.testing.assert_allclose(scaled[:, :-2], plain[:, :-2] / np.sqrt(MODEL.head_dim), rtol=1e-6)
    np.testing.assert_array_equal(scaled[:, -2:], plain[:, -2:])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA', only LORA"),
        ({"use_dora": True}, "use_dora is true, which is not supported"),
        ({"bias": "all"}, 'bias is "all", which is not supported'),
        ({"modules_to_save": ["lm_head"]}, r'modules_to_save is \["lm_head"\], which is not supported'),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is .*, which is not supported"),
        ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow is 1, which is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes the weights"),
        ({"r": 8}, "is an adapter of rank 8, this server has room for 4; raise --max-lora-rank"),
        ({"r": 0}, "r must be a positive whole number, got 0"),
        ({"r": 3}, r"lora_[AB].weight has shape \[.*\], expected \[.*3.*\]"),
        ({"lora_alpha": None}, "lora_alpha must be a number, got None"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number, got 1000"),
    ],
    ids=str,
)
def test_a_config_that_is_not_understood_is_refused_by_field(tmp_path, tensors, fields, says):
    with pytest.raises((UnsupportedModel, CheckpointError), match=says):
        read(save_adapter(tmp_path, tensors, **fields))


def spoilt(tensors, **changes):
    return {**tensors, **changes}


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda t: t.update({QUERY: np.full_like(t[QUERY], np.nan)}), f"tensor {QUERY} holds 96 numbers of 96"),
        (lambda t: t.update({QUERY: t[QUERY][:, :-1]}), rf"tensor {QUERY} has shape \[2, 47\], expected \[2, 48\]"),
        (lambda t: t.update({QUERY: t[QUERY].astype(np.int8)}), f"tensor {QUERY} has type I8, which is not supported"),
        (lambda t: t.pop(QUERY), "tensor model.layers.1.self_attn.q_proj.lora_A is missing"),
        (
            lambda t: [t.pop(tensor_name(1, "o_proj", matrix)) for matrix in "AB"],
            "tensor model.layers.1.self_attn.o_proj.lora_A is missing",
        ),
        (
            lambda t: t.update({QUERY.replace(".1.", ".7."): t[QUERY]}),
            "layers.7.self_attn.q_proj.lora_A.weight is of layer 7, but the model has 2 layers",
        ),
        (
            lambda t: t.update({"base_model.model.lm_head.lora_A.weight": t[QUERY]}),
            "tensor base_model.model.lm_head.lora_A.weight is not of a kind that is adapted here, which are q_proj, k_",
        ),
        (
            lambda t: t.update({QUERY.replace("lora_A.weight", "lora_magnitude_vector"): t[QUERY]}),
            "q_proj.lora_magnitude_vector is not of a kind",
        ),
    ],
    ids=["nan", "shape", "dtype", "half", "layer", "layer too many", "head", "dora"],
)
def test_a_bad_tensor_is_refused_by_name(tmp_path, tensors, spoil, says):
    folder = save_adapter(tmp_path, tensors)
    spoil(tensors)
    save_adapter(tmp_path, tensors, **json.loads((tmp_path / CONFIG).read_text()))
    with pytest.raises((UnsupportedModel, CheckpointError), match=says):
        read(folder)


def test_experts_are_not_adapted(tmp_path):
    with pytest.raises(
        UnsupportedModel, match=r"down_proj.lora_A.weight is not of a kind .* q_proj, k_proj, v_proj, o_"
    ):
        read(save_adapter(tmp_path / "all", random_tensors(MOE, seed=1, rank=2)), MOE)
    assert read(save_adapter(tmp_path / "some", random_tensors(MOE, seed=1, rank=2, targets=ATTENTION)), MOE)


def test_files_that_are_missing_cut_or_too_large_are_named(tmp_path, tensors):
    with pytest.raises(CheckpointError, match="http://x is a URL of a kind that is not read"):
        read("http://x")
    with pytest.raises(NoSuchAdapter, match=f"there is no adapter at {re.escape(str(tmp_path))}/none"):
        read(tmp_path / "none")
    with pytest.raises(CheckpointError, match=f"is no adapter: it lacks {CONFIG}"):
        read(tmp_path)
    save_adapter(tmp_path, tensors)
    whole = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(whole[:-7])
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors \([\d,]+ bytes\) is cut or corrupt"):
        read(tmp_path)
    with (tmp_path / WEIGHTS).open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(
        CheckpointError, match=r"has 1,073,741,824 bytes, more than the [\d,]+ that an adapter of rank 2"
    ):
        read(tmp_path)
    (tmp_path / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} is a pointer of Git LFS"):
        read(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {WEIGHTS}"):
        read(tmp_path)
    (tmp_path / CONFIG).write_text("[1]")
    with pytest.raises(CheckpointError, match="holds a list, expected a JSON object"):
        read(tmp_path)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_pipe_is_refused_before_anybody_waits_for_it(tmp_path, tensors, name):
    folder = save_adapter(tmp_path, tensors)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is a pipe or a device"):
        read(folder)
