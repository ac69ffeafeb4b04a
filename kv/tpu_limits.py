"""What the TPU's kernel takes of a chip's memories, and the sizes that it chooses. Pure functions of numbers."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

KIB, MIB = 1 << 10, 1 << 20
LANES = 128
SMEM_BYTES = 1 * MIB
"""Scalar memory of one core, the same from v4 to v7x."""
VMEM_BYTES = 16 * MIB
"""What a kernel may use unless it asks for more."""
_SMEM_RESERVE = 8 * KIB  # what the compiler keeps for itself
_BLOCK_BYTES = 1 * MIB  # keys and values of one of the two buffers: enough on its way to keep the memory busy
_STRIP_TOKENS = 256
_SCORE_BYTES = 256 * KIB  # one KV head's scores of a strip


class BlockSizes(NamedTuple):
    pages_per_strip: int
    strips_per_block: int


class HbmBytes(NamedTuple):
    read: int
    written: int
    floor: int
    """Each key and value that a query sees read once, and each new one written."""


def granule(dtype: jnp.dtype, *, is_scale: bool) -> int:
    """Tokens of a page that can be written alone: one tile of rows, or of scales one row of lanes."""
    return LANES if is_scale else 32 // dtype.itemsize


def block_sizes(
    num_kv_heads: int, page_size: int, head_dim: int, itemsize: int, rows: int, pages_per_slot: int
) -> BlockSizes:
    """What is multiplied and what is fetched at once; `rows` are those of a tile's score matrix per KV head."""
    tokens = min(_STRIP_TOKENS, max(_SCORE_BYTES // (4 * max(rows, 8)), LANES))
    pages_per_strip = min(max(tokens // page_size, 1), pages_per_slot)
    token_bytes = 2 * num_kv_heads * max(head_dim, LANES) * itemsize
    strips = _BLOCK_BYTES // (token_bytes * pages_per_strip * page_size)
    return BlockSizes(pages_per_strip, min(max(strips, 1), -(-pages_per_slot // pages_per_strip)))


def table_bytes(num_tiles: int, pages_per_slot: int) -> int:
    """Scalar memory of a call: page rows, and four numbers per tile."""
    return 4 * num_tiles * (pages_per_slot + 4) + _SMEM_RESERVE


def vmem_bytes(num_kv_heads: int, rows: int, tile_tokens: int, head_dim: int, block_tokens: int, itemsize: int) -> int:
    """Of a call: two blocks; queries, result and what is new, each twice; sums of the softmax; scores of a strip."""
    K, H, M = num_kv_heads, head_dim, -(-rows // 8) * 8
    blocks = 2 * 2 * K * block_tokens * H * itemsize
    tiles = 2 * K * (M * H * (4 + 4) + 2 * (tile_tokens + 64) * H * itemsize)
    return blocks + tiles + 2 * K * M * LANES * 4 + 4 * M * _STRIP_TOKENS * 4


def hbm_bytes(
    spans: Sequence[tuple[int, int]],
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: jnp.dtype,
    window: int | None = None,
) -> HbmBytes:
    """Keys and values that one call copies, of tiles whose tokens are at `first` to `last`. Whole pages are read, and
    whole granules written."""
    first, last = np.asarray(spans, np.int64).reshape(-1, 2).T
    seen = np.zeros_like(first) if window is None else np.maximum(first - window + 1, 0)
    token = 2 * num_kv_heads * head_dim * dtype.itemsize
    scale = 2 * num_kv_heads * 2 if dtype == jnp.int8 else 0

    def touched(start: np.ndarray, size: int) -> int:
        return int(np.sum((last // size - start // size + 1) * size))

    read = touched(seen, page_size) * (token + scale)
    written = touched(first, granule(dtype, is_scale=False)) * token + touched(first, LANES) * scale
    floor = int(np.sum(last - seen + 1) + np.sum(last - first + 1)) * (token + scale)
    return HbmBytes(read, written, floor)
