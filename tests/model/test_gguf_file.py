import dataclasses

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from gguf import quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.convert import convert
from model.errors import CheckpointError, PodstreamError, UnsupportedModel
from model.families import read_config
from model.gguf_file import read_gguf
from model.gguf_rope import rope_factors
from model.hf_folder import read_hf_folder
from tests.model.parity import golden_folder
from tests.model_files import (
    ARCHITECTURES,
    LLAMA3,
    tiny_fields,
    tiny_tensors,
    to_gguf,
    write_family_gguf,
    write_gguf,
    write_tiny_gguf,
)


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_reads_what_hugging_face_reads(tiny_gguf):
    expected, tensors = tiny_tensors()
    model = read_gguf(tiny_gguf)
    assert model.config == expected.config
    assert model.generation.eos_token_ids == expected.generation.eos_token_ids
    assert (model.text.bos_token, model.text.eos_token, model.text.add_bos) == ("<|begin|>", "<|end|>", False)
    assert model.text.chat_template == expected.text.chat_template
    assert model.dtype == "float32"
    assert model.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(model.tensors[name].read(), tensor, err_msg=name)


def test_untied_head_is_read(tmp_path):
    expected, tensors = tiny_tensors(LLAMA3)
    model = read_gguf(write_gguf(tmp_path / "m.gguf", tiny_fields(expected), to_gguf(expected, tensors)))
    assert not model.config.tie_embeddings
    np.testing.assert_array_equal(model.tensors["lm_head.weight"].read(), tensors["lm_head.weight"])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_family_reads_what_hugging_face_reads(tmp_path, name):
    expected = read_hf_folder(golden_folder(name, tmp_path))
    tensors = {key: tensor.read() for key, tensor in expected.tensors.items()}
    model = read_gguf(write_family_gguf(tmp_path / "m.gguf", name, expected, tensors))
    query_scale = None if expected.config.query_scale is None else float(expected.config.head_dim)  # not in the file
    assert model.config == dataclasses.replace(expected.config, query_scale=query_scale)
    assert (model.keys, model.tensors.keys()) == (expected.keys, tensors.keys())
    for key, tensor in tensors.items():
        np.testing.assert_allclose(model.tensors[key].read(), tensor, atol=1e-6, err_msg=key)


def _k_block(quant: Quant) -> tuple[np.ndarray, float]:
    """One block of 256 equal numbers, written by hand, and that number: scale 1, minimum 1, quant 5."""
    one = np.float16(1).tobytes()
    scales = bytes([1] * 8 + [0x11] * 4)  # 6-bit scales and minimums, all 1
    match quant:
        case Quant.Q4_K:
            return np.frombuffer(one + one + scales + bytes([0x55] * 128), np.uint8), 5 - 1
        case Quant.Q5_K:  # the fifth bit set everywhere
            return np.frombuffer(one + one + scales + bytes([0xFF] * 32) + bytes([0x55] * 128), np.uint8), 21 - 1
        case Quant.Q6_K:  # upper bits 0, offset 32
            return np.frombuffer(bytes([0x55] * 128) + bytes(64) + bytes([1] * 16) + one, np.uint8), 5 - 32
    raise AssertionError(quant)


def _with_one_tensor(path, name, tensor):
    """A file of the tiny model's metadata, widened to whole blocks, that holds one tensor."""
    model, _ = tiny_tensors()
    return read_gguf(write_gguf(path, tiny_fields(model), {name: tensor})).tensors


@pytest.mark.parametrize("quant", [Quant.Q4_K, Quant.Q5_K, Quant.Q6_K])
def test_k_quants_written_by_hand(tmp_path, quant):
    block, number = _k_block(quant)
    rows = np.tile(block, (3, 2))
    tensors = _with_one_tensor(tmp_path / "m.gguf", "blk.0.ffn_down.weight", (rows, quant))
    down = tensors["model.layers.0.mlp.down_proj.weight"]
    assert down.shape == (3, 512)
    np.testing.assert_array_equal(down.read(), np.full((3, 512), number, np.float32))


@pytest.mark.parametrize(
    ("quant", "error"),
    [
        (Quant.F16, 1e-3),
        (Quant.BF16, 8e-3),
        (Quant.Q8_0, 0.02),
        (Quant.Q4_0, 0.3),
        (Quant.Q4_1, 0.2),
        (Quant.Q5_0, 0.15),
        (Quant.Q5_1, 0.1),
    ],
)
def test_other_quants_are_near_what_was_quantised(tmp_path, quant, error):
    numbers = np.random.default_rng(0).uniform(-1, 1, (3, 64)).astype(np.float32)
    packed = numbers.astype(np.float16) if quant == Quant.F16 else (quantize(numbers, quant), quant)
    tensors = _with_one_tensor(tmp_path / "m.gguf", "blk.1.ffn_up.weight", packed)
    read = tensors["model.layers.1.mlp.up_proj.weight"].read()
    assert read.dtype == np.float32
    np.testing.assert_allclose(read, numbers, atol=error)


def test_bfloat16_matrices_make_a_bfloat16_model(tmp_path):
    model, tensors = tiny_tensors()
    packed = {
        name: (quantize(tensor, Quant.BF16), Quant.BF16) if tensor.ndim > 1 else tensor
        for name, tensor in to_gguf(model, tensors).items()
    }
    assert read_gguf(write_gguf(tmp_path / "m.gguf", tiny_fields(model), packed)).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"llama__rope__scaling__type": "yarn"}, "'yarn'"),
        ({"llama__rope__dimension_count": 8}, "rope.dimension_count 8"),
        ({"tokenizer__ggml__model": "rwkv"}, "'rwkv'"),
        ({"tokenizer__ggml__pre": "deepseek-llm"}, "'deepseek-llm'"),
        ({"tokenizer__ggml__pre": None}, "'None'"),
        ({"general__type": "adapter"}, "is no model but 'adapter', which is made for one; give the file of the model"),
    ],
)
def test_unknown_features_are_named(tmp_path, changes, word):
    with pytest.raises(UnsupportedModel, match=word):
        read_gguf(write_tiny_gguf(tmp_path / "m.gguf", **changes))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"llama__block_count": None}, "llama.block_count must be a positive"),
        ({"llama__embedding_length": "wide"}, "got 'wide'"),
        ({"tokenizer__ggml__merges": None}, "lacks tokenizer.ggml.merges"),
        ({"tokenizer__ggml__merges": ["a qqq"]}, "tokenizer cannot be loaded"),
        ({"tokenizer__ggml__token_type": [1, 1]}, "320 tokens but 2 token types"),
        ({"tokenizer__ggml__eos_token_id": 5000}, "eos_token_id 5000"),
        ({"tokenizer__ggml__eot_token_id": 5000}, "end token 5000"),
    ],
)
def test_broken_metadata_is_named(tmp_path, changes, word):
    with pytest.raises(CheckpointError, match=word):
        read_gguf(write_tiny_gguf(tmp_path / "m.gguf", **changes))


def test_other_architecture_and_tensor_type_are_named(tmp_path):
    model, _ = tiny_tensors()
    path = write_gguf(tmp_path / "a.gguf", tiny_fields(model), {}, architecture="mamba")
    with pytest.raises(UnsupportedModel, match="'mamba'"):
        read_gguf(path)
    blocks = (np.zeros((1, 84), np.uint8), Quant.Q2_K)
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.ffn_up\.weight has the unsupported type Q2_K"):
        _with_one_tensor(tmp_path / "b.gguf", "blk.0.ffn_up.weight", blocks)


def test_all_end_tokens_count(tmp_path):
    model = read_gguf(
        write_tiny_gguf(tmp_path / "m.gguf", tokenizer__ggml__eot_token_id=3, tokenizer__ggml__eom_token_id=1)
    )
    assert model.generation.eos_token_ids == (1, 3)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_recovered_from_its_factors(tmp_path, factor):
    _, config = read_config(
        {
            "model_type": "llama", "vocab_size": 8, "num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 8,
            "num_attention_heads": 2, "max_position_embeddings": 8,
            "rope_scaling": {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 8192},
        }
    )  # fmt: skip
    model, _ = tiny_tensors()
    fields = tiny_fields(model) | {
        "llama.rope.freq_base": 500_000.0, "llama.attention.key_length": 64, "llama.attention.value_length": 64,
        "llama.rope.dimension_count": 64,
    }  # fmt: skip
    factors = rope_factors(config.rope_scaling, 64, 500_000.0)
    read = read_gguf(write_gguf(tmp_path / "m.gguf", fields, {"rope_freqs.weight": factors}))
    assert read.config.rope_scaling == config.rope_scaling
    assert "rope_freqs.weight" not in read.tensors
    factors[3] = 2.0
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight"):
        read_gguf(write_gguf(tmp_path / "n.gguf", fields, {"rope_freqs.weight": factors}))


def test_no_file_and_no_gguf(tmp_path):
    with pytest.raises(CheckpointError, match="is not a file"):
        read_gguf(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("hello, I am text")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        read_gguf(tmp_path / "text.gguf")


def test_cut_data_names_a_tensor_and_the_numbers(tiny_gguf, tmp_path):
    whole = tiny_gguf.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=rf"is cut: tensor \S+ ends at byte {len(whole):,}"):
        read_gguf(tmp_path / "cut.gguf")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_the_header_escapes(tiny_gguf, tmp_path, data):
    """Cut anywhere, and any byte of the header changed: an error of ours or a model, never another exception."""
    whole = bytearray(tiny_gguf.read_bytes())
    header_bytes = 12_000
    where = data.draw(st.integers(0, header_bytes - 1))
    whole[where] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(whole[:end])
    try:
        convert(read_gguf(path))
    except PodstreamError as error:
        assert str(error).endswith(".")
