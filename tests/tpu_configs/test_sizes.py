"""Arithmetic from a model's numbers, held against the arrays that are served."""

import pytest

from kv.cache import abstract_cache
from model.config import ModelConfig
from model.quantization import choose_quantization
from sharding.mesh import make_mesh
from sharding.params import abstract_params
from sharding.rules import choose_rules
from sharding.sizes import device_bytes
from sharding.spec import MeshSpec
from tpu_configs.catalog import deployment
from tpu_configs.sizes import Sizes

SHAPE = {"embed_dim": 64, "mlp_dim": 128, "head_dim": 32}  # groups of int4 divide all of them
DENSE = ModelConfig.tiny(**SHAPE, tie_embeddings=False)
EXPERTS = ModelConfig.tiny(**SHAPE, num_experts=4, experts_per_token=2)
GEMMA = ModelConfig.tiny(**SHAPE, sandwich_norms=True, qk_norm=True, windows=(8, None))
QWEN = ModelConfig.tiny(**SHAPE, qkv_bias=True)


@pytest.mark.parametrize("model", [DENSE, EXPERTS, GEMMA, QWEN], ids=["dense", "experts", "gemma", "qwen"])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_weights_have_the_bytes_that_are_counted(model, tensor, quantize):
    spec = MeshSpec(tensor=tensor)
    mesh, rules = make_mesh(spec), choose_rules(model, spec)
    arrays = abstract_params(model, mesh, rules, "bfloat16", choose_quantization(quantize, None))
    assert Sizes(model, tensor, "bfloat16", quantize, "bfloat16").weight_bytes == device_bytes(arrays)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_pages_have_the_bytes_that_are_counted(kv_dtype, tensor):
    spec = MeshSpec(tensor=tensor)
    model = ModelConfig.tiny(head_dim=128)
    cache = abstract_cache(model, 3, 8, kv_dtype, make_mesh(spec), choose_rules(model, spec))
    assert Sizes(model, tensor, "bfloat16", None, kv_dtype).kv_token_bytes * 3 * 8 == device_bytes(cache)
    narrow = ModelConfig.tiny(head_dim=64)
    sizes = [Sizes(one, tensor, "bfloat16", None, kv_dtype).kv_token_bytes for one in (narrow, model)]
    assert sizes[0] == sizes[1], "a head of 64 takes the room of 128"


@pytest.mark.parametrize(
    ("name", "billions"),
    [("smollm2-135m-v5e-1", 0.1345), ("llama-3.1-8b-v6e-1", 8.0), ("llama-3.1-70b-v6e-8", 70.6),
     ("qwen3-32b-v6e-8", 32.8),
     ("llama-3.1-405b-int8-v5p-16", 405.9), ("mixtral-8x7b-int8-v5e-16", 46.7), ("gemma-3-27b-v6e-8", 27.0),
     ("qwen3-30b-a3b-v6e-8", 30.5)],
)  # fmt: skip
def test_models_are_as_large_as_they_are_called(name, billions):
    assert Sizes.of(deployment(name)).num_params / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_step_reads_the_experts_that_its_rows_go_to():
    sizes = Sizes(EXPERTS, 1, "bfloat16", None, "bfloat16")
    assert sizes.read_bytes(1) < sizes.read_bytes(2) < sizes.read_bytes(64)
    assert sizes.read_bytes(64) == pytest.approx(sizes.weight_bytes, rel=1e-6)


def test_a_step_does_not_read_the_table_of_tokens_unless_it_is_the_head():
    sizes = Sizes(DENSE, 1, "bfloat16", None, "bfloat16")
    assert sizes.weight_bytes - sizes.read_bytes(8) == DENSE.vocab_size * DENSE.embed_dim * 2


def test_layers_with_a_window_read_no_further_back():
    sizes = Sizes(GEMMA, 1, "bfloat16", None, "bfloat16")
    assert sizes.kv_read_bytes(100) == sizes.kv_token_bytes / 2 * (8 + 100)
