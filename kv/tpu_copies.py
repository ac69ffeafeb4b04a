"""What one call of the TPU's kernel is, and the copies between HBM and its buffers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_FEW_ROWS = 32  # of a score matrix


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What is static of one call: S tiles of Q tokens, over K KV heads on this device."""

    num_tiles: int
    num_parts: int
    """Runs of tiles, one for each core."""
    tile_tokens: int
    num_kv_heads: int
    reps: int
    """Query heads per KV head."""
    head_dim: int
    page_size: int
    pages_per_slot: int
    pages_per_strip: int
    """Strips are multiplied one after another, and only those that the tile's queries reach."""
    strips_per_block: int
    """Blocks are fetched one after another."""
    granules: tuple[int, ...]
    """Tokens that can be written alone, of each pool."""
    product_dtype: str
    has_window: bool
    softcap: float | None

    @property
    def tiles_per_part(self) -> int:
        return self.num_tiles // self.num_parts

    @property
    def rows(self) -> int:
        """Of a tile's score matrix, per KV head."""
        return self.tile_tokens * self.reps

    @property
    def pages_per_block(self) -> int:
        return self.pages_per_strip * self.strips_per_block

    @property
    def strip_tokens(self) -> int:
        return self.pages_per_strip * self.page_size

    @property
    def block_tokens(self) -> int:
        return self.pages_per_block * self.page_size


@dataclass(frozen=True, slots=True)
class Pool:
    """One array of pages: where it lies, what this tile adds to it, and the two buffers for blocks of it."""

    pages: Any
    """[L, P, K, G, ..] in HBM."""
    new: Any
    """[1, K, whole granules, ..], aligned to them; [1, K, ..] where a tile is one token."""
    blocks: Any
    """[2, K, U, ..]"""
    granule: int


class TileCopies:
    """The copies of one tile's blocks. A copy is awaited by describing it once more."""

    def __init__(
        self,
        call: Any,
        table: Any,
        first_S: Any,
        count_S: Any,
        pools: list[Pool],
        arriving: Any,
        leaving: Any,
        shape: KernelShape,
    ) -> None:
        self.call, self.table, self.first_S, self.count_S = call, table, first_S, count_S
        self.pools, self.arriving, self.leaving, self.shape = pools, arriving, leaving, shape

    def blocks(self, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        """From the first block that a query of the tile sees to the one after its last token."""
        U = self.shape.block_tokens
        return self._first_seen(tile) // U, self._last(tile) // U + 1

    def strips(self, tile: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Those of this block that a query of the tile sees, counted from the first of the sequence."""
        C, start = self.shape.strip_tokens, block * self.shape.strips_per_block
        end = jnp.minimum(self._last(tile) // C + 1, start + self.shape.strips_per_block)
        return jnp.maximum(self._first_seen(tile) // C, start), end

    def fetch(self, tile: jax.Array, block: jax.Array, buffer: jax.Array) -> None:
        self._each_page(tile, block, buffer, lambda copy: copy.start())

    def await_block(self, tile: jax.Array, block: jax.Array, buffer: jax.Array) -> None:
        self._each_page(tile, block, buffer, lambda copy: copy.wait())

    def store(self, tile: jax.Array, block: jax.Array, buffer: jax.Array) -> None:
        """Lay what is new into the block, and send the granules around it back."""

        is_one = self.shape.tile_tokens == 1

        def lay(pool: Pool, at: jax.Array, index: int, start: jax.Array) -> None:
            R, part = pool.granule, slice(index * pool.granule, (index + 1) * pool.granule)

            def put(place: Any, new: jax.Array, axis: int) -> None:
                sizes = (R, 1) if axis == 0 else (1, R)
                token = at + jax.lax.broadcasted_iota(jnp.int32, sizes, axis) - self.first_S[tile]
                place[...] = jnp.where((token >= 0) & (token < self.count_S[tile]), new, place[...])

            def put_head(head: Any) -> None:
                new = pool.new[0, pl.ds(head, 1)] if is_one else pool.new[0, head, part]
                put(pool.blocks.at[buffer, head, pl.ds(start, R)], new, axis=0)

            if len(pool.blocks.shape) == 3:  # scales
                put(pool.blocks.at[buffer, :, pl.ds(start, R)], pool.new[0] if is_one else pool.new[0, :, part], axis=1)
            else:
                each_head(self.shape, put_head)

        self._each_granule(tile, block, buffer, lay, lambda copy: copy.start())

    def await_stores(self, tile: jax.Array, block: jax.Array, buffer: jax.Array) -> None:
        self._each_granule(tile, block, buffer, None, lambda copy: copy.wait())

    def _last(self, tile: jax.Array) -> jax.Array:
        return self.first_S[tile] + self.count_S[tile] - 1

    def _first_seen(self, tile: jax.Array) -> jax.Array:
        if not self.shape.has_window:
            return jnp.int32(0)
        return jnp.maximum(self.first_S[tile] - self.call[1] + 1, 0)

    def _page(self, tile: jax.Array, number: jax.Array) -> jax.Array:
        return self.table[tile * self.shape.pages_per_slot + number]

    def _each_page(self, tile: jax.Array, block: jax.Array, buffer: jax.Array, do: Callable[[Any], None]) -> None:
        G, per_block, layer = self.shape.page_size, self.shape.pages_per_block, self.call[0]
        first = jnp.maximum(self._first_seen(tile) // G - block * per_block, 0)
        end = jnp.minimum(self._last(tile) // G + 1 - block * per_block, per_block)

        def one_page(i: jax.Array, _: None) -> None:
            page = self._page(tile, block * per_block + i)
            for pool in self.pools:
                place = pool.blocks.at[buffer, :, pl.ds(pl.multiple_of(i * G, G), G)]
                do(pltpu.make_async_copy(pool.pages.at[layer, page], place, self.arriving.at[buffer]))

        jax.lax.fori_loop(first, end, one_page, None)

    def _each_granule(
        self,
        tile: jax.Array,
        block: jax.Array,
        buffer: jax.Array,
        lay: Callable[[Pool, jax.Array, int, jax.Array], None] | None,
        do: Callable[[Any], None],
    ) -> None:
        """Those of this block that the tile's tokens lie in; `lay` is told the granule's position and place."""
        G, U, layer = self.shape.page_size, self.shape.block_tokens, self.call[0]
        for pool in self.pools:
            R = pool.granule
            for index in range(num_granules(self.shape.tile_tokens, R)):
                at = (self.first_S[tile] // R + index) * R

                @pl.when((at <= self._last(tile)) & (at // U == block))
                def touched(pool: Pool = pool, R: int = R, index: int = index, at: jax.Array = at) -> None:
                    start = pl.multiple_of(at % U, R)
                    if lay is not None:
                        lay(pool, at, index, start)
                    place = pool.pages.at[layer, self._page(tile, at // G), :, pl.ds(pl.multiple_of(at % G, R), R)]
                    do(pltpu.make_async_copy(pool.blocks.at[buffer, :, pl.ds(start, R)], place, self.leaving.at[0]))


def each_head(shape: KernelShape, do: Callable[[Any], None]) -> None:
    """One after the other in the code where a head has little work, so that they overlap; else in a loop, which is
    compiled in a fraction of the time. Rows of scales can only be told apart by a number that is known."""
    if shape.num_kv_heads == 1 or shape.rows <= _FEW_ROWS or len(shape.granules) == 3:
        for head in range(shape.num_kv_heads):
            do(head)
    else:
        jax.lax.fori_loop(0, shape.num_kv_heads, lambda head, _: do(head), None)


def num_granules(tile_tokens: int, granule: int) -> int:
    """That so many tokens in a row can touch."""
    return -(-(tile_tokens - 1) // granule) + 1
