"""Embeddings of prompts: the last layer's words on all tokens of a prompt, or on its last one, as one vector.

They come from the steps that prefill the prompt, tile by tile, beside everyone's decode. Tiles begin at multiples of
their size, so that a prompt that was preempted can be taken up again tile by tile, too. Programs of an engine that
makes no embeddings have nothing of this in them.
"""

import enum
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from kv.page_table import pages_for
from serving.engine.plan import StepPlan
from serving.engine.sequence import Sequence


class Pooling(enum.StrEnum):
    MEAN = "mean"
    """Of all tokens."""
    LAST = "last"
    """The last token's."""


ROWS = {Pooling.MEAN: 0, Pooling.LAST: 1}


def pool_tiles(x_SQD: jax.Array, positions_SQ: jax.Array) -> jax.Array:
    """float32[2, S, D], by ROWS: the sum of each tile's tokens, and its last one; both cost next to nothing.

    Places without a token have a negative position.
    """
    is_token_SQ = positions_SQ >= 0
    sum_SD = jnp.sum(jnp.where(is_token_SQ[..., None], x_SQD, 0.0), axis=1)
    last_S = jnp.maximum(jnp.sum(is_token_SQ, axis=1) - 1, 0)
    return jnp.stack([sum_SD, jnp.take_along_axis(x_SQD, last_S[:, None, None], axis=1)[:, 0]])


@dataclass(frozen=True, slots=True, eq=False)
class PooledTile:
    sequence: Sequence
    start: int
    """Position of its first token."""
    end: int
    tile: int
    """Which of the step's."""


@dataclass(frozen=True, slots=True, eq=False)
class PoolingInFlight:
    """What one step adds to embeddings, on its way to the host."""

    pooling: Pooling
    pooled_2SD: jax.Array
    tiles: tuple[PooledTile, ...]
    """Those that somebody wants."""

    @classmethod
    def of(
        cls, plan: StepPlan, pooling: Pooling | None, pooled_2SD: jax.Array | None, tile_tokens: int
    ) -> "PoolingInFlight | None":
        """None when nobody asked: then it stays on the device."""
        if pooling is None or pooled_2SD is None or not any(chunk.sequence.wants_pooling for chunk in plan.prefill):
            return None
        pooled_2SD.copy_to_host_async()
        return cls(
            pooling, pooled_2SD, tuple(tile for tile in _tiles(plan, tile_tokens) if tile.sequence.wants_pooling)
        )

    def commit(self) -> dict[str, bytes]:
        """Add them up; returns the embeddings that are complete, by request id. Waits for the device."""
        pooled_SD, complete = np.asarray(self.pooled_2SD)[ROWS[self.pooling]], {}
        for tile in self.tiles:
            sequence = tile.sequence
            if tile.start != sequence.num_pooled:  # of a step before it was preempted, and computed again meanwhile
                continue
            before_D = 0 if sequence.pooled_D is None or self.pooling is Pooling.LAST else sequence.pooled_D
            sequence.pooled_D = before_D + pooled_SD[tile.tile]
            sequence.num_pooled = tile.end
            if not sequence.wants_pooling:
                complete[sequence.request_id] = _unit(sequence.pooled_D)
        return complete


def _tiles(plan: StepPlan, tile_tokens: int) -> list[PooledTile]:
    tiles: list[PooledTile] = []
    number = 0
    for chunk in plan.prefill:
        end = chunk.start + chunk.length
        for i in range(pages_for(chunk.length, tile_tokens)):
            start = chunk.start + i * tile_tokens
            tiles.append(PooledTile(chunk.sequence, start, min(start + tile_tokens, end), number + i))
        number += pages_for(chunk.length, tile_tokens)
    return tiles


def _unit(vector_D: NDArray[np.float32]) -> bytes:
    """Of length 1, so that a mean need not be divided; float32, little-endian."""
    length = float(np.linalg.norm(vector_D.astype(np.float64)))
    return (vector_D / (length or 1.0)).astype("<f4").tobytes()
