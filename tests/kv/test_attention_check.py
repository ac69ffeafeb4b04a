"""What a backend cannot serve is said in one sentence, with the numbers and the way out."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv.attention_check import AttentionError, AttentionNeeds, check_attention
from kv.tpu_limits import SMEM_BYTES, block_sizes, hbm_bytes, table_bytes
from model.config import ModelConfig

LLAMA_70B = ModelConfig.tiny(num_heads=64, num_kv_heads=8, head_dim=128)
NEEDS = AttentionNeeds(LLAMA_70B, "tpu", 8, 8, "bfloat16", page_size=128, pages_per_slot=64, num_slots=256)


@pytest.mark.parametrize("name", ["tpu", "ragged", "xla"])
def test_what_is_served_raises_nothing(name):
    check_attention(name, NEEDS)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("cpu", {}, "got 8 of platform tpu with pages of bfloat16; use --attention xla."),
        ("tpu", {"platform": "cpu"}, "'tpu' is compiled for TPUs, and the mesh has devices of platform cpu."),
        ("gpu", {}, "'gpu' is compiled for GPUs"),
        ("gpu", {"platform": "gpu", "page_size": 24}, "needs pages of 16, 32, 64 .. (a power of two), got 24"),
        ("tpu", {"page_size": 24}, "writes bfloat16 pages 16 tokens at a time, and 24 is not a multiple"),
        ("tpu", {"kv_dtype": "int8", "page_size": 64}, "int8 pages 128 tokens at a time, and 64 is not a multiple"),
        ("tpu", {"pages_per_slot": 2_048}, "256 slots with 2,048 pages each takes 2.01 MiB of a TPU's scalar memory, "
         "which has 1.00 MiB; use --page-size 512,"),
        ("ragged", {"kv_dtype": "int8"}, "one scale for all int8 pages"),
        ("ragged", {"kv_dtype": "fp8"}, "8 KV heads over 8 devices are 2 rows of keys and values on each"),
        ("ragged", {"config": replace(LLAMA_70B, num_heads=48, num_kv_heads=6), "kv_shards": 2}, "are 6 rows"),
        ("ragged", {"config": replace(LLAMA_70B, windows=(4_096, None))}, "layers of this model have 2 (none, 4,096)"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_said(name, changes, words):
    with pytest.raises(AttentionError) as error:
        check_attention(name, replace(NEEDS, **changes))
    assert words in str(error.value) and str(error.value).endswith(".")


def test_one_kv_head_with_8_bit_pages_is_served():
    for kv_dtype in ("int8", "fp8"):
        check_attention("tpu", replace(NEEDS, kv_dtype=kv_dtype))


def test_the_page_size_that_is_offered_is_served():
    pages_per_slot = 2_048 * 128 // 512
    assert table_bytes(256, pages_per_slot) <= SMEM_BYTES < table_bytes(256, 2 * pages_per_slot)
    check_attention("tpu", replace(NEEDS, page_size=512, pages_per_slot=pages_per_slot))


@pytest.mark.parametrize(("kv_heads", "page_size", "rows"), [(1, 16, 8), (8, 128, 4), (8, 128, 256), (32, 128, 1)])
def test_blocks_are_whole_pages_within_their_memory(kv_heads, page_size, rows):
    strip, strips = block_sizes(kv_heads, page_size, 128, 2, rows, 64)
    assert strip * page_size in (128, 256) and strips >= 1
    assert strip * strips * page_size * kv_heads * 512 <= max(1 << 20, strip * page_size * kv_heads * 512)


@given(
    st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 40)), min_size=1),
    st.sampled_from(["float32", "bfloat16", "int8"]),
    st.one_of(st.none(), st.integers(1, 6_000)),
)
def test_a_call_reads_at_most_two_pages_per_tile_too_many(starts, dtype, window):
    spans = [(first, first + extra) for first, extra in starts]
    read, written, floor = hbm_bytes(spans, 2, 128, 128, jnp.dtype(dtype), window)
    new = sum(extra + 1 for _, extra in starts)
    token = 2 * 2 * (128 * jnp.dtype(dtype).itemsize + (2 if dtype == "int8" else 0))
    assert floor - new * token <= read <= floor - new * token + len(spans) * 2 * 127 * token
    assert new * token <= written <= (new + len(spans) * 2 * 127) * token


def test_decode_at_a_context_of_2k_moves_a_twentieth_more_than_it_must():
    read, written, floor = hbm_bytes(
        [(2_048 + 3 * i, 2_048 + 3 * i) for i in range(128)], 1, 128, 128, jnp.dtype("bfloat16")
    )
    assert (read + written) / floor < 1.05
