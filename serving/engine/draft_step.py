"""What a draft model does on the device: it reads tokens that others computed, and guesses how they go on.

It is a smaller model with the same tokens, and has keys and values of its own in pages of the same numbers: the page
rows of the served model serve it too. What stands there decides how good guesses are, never what an answer says.

A guess is chosen as the served model will choose: with the request's sampling, its seed and the same position. Since a
draw depends on these alone, two models that find the same tokens likely draw the same token, also at high temperature.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from kv.backends import PagedAttention
from kv.cache import KVCache
from kv.page_table import PageTable, pages_for
from kv.paged_attention import PagedView, TileGroup, paged_attention, step_attention
from model.config import ModelConfig
from model.decoder import Decoder
from model.seams import ONE_DEVICE, Seams
from serving.engine.batch import NOTHING, Ladder
from serving.engine.plan import Chunk
from serving.engine.sampling import RowSampling, sample
from serving.engine.slot_state import SlotState
from sharding.params import bind

CATCH_UP_TILE = 16  # tokens; rows that fell behind by a few should not fill large tiles with nothing

CatchUpFn = Callable[[tuple[jax.Array, ...], KVCache, jax.Array], KVCache]


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """What the programs of a draft model share."""

    config: ModelConfig
    max_tokens: int
    """Tokens that one call may read."""
    attention: PagedAttention = paged_attention
    seams: Seams = ONE_DEVICE

    @property
    def max_tiles(self) -> int:
        """Of one call that reads."""
        return pages_for(self.max_tokens, CATCH_UP_TILE)

    @property
    def catch_ups(self) -> tuple[int, ...]:
        """Numbers of tiles for which there is a program."""
        return tuple(Ladder().up_to(self.max_tiles))


def guess(
    spec: DraftSpec,
    decoder: Decoder,
    cache: KVCache,
    newest_R: jax.Array,
    position_R: jax.Array,
    wanted_RD: jax.Array,
    pages_RJ: jax.Array,
    rows: RowSampling,
    slots: SlotState,
) -> tuple[jax.Array, KVCache]:
    """int32[R, D] guesses where `wanted_RD` is not negative, NOTHING elsewhere and where the draft model broke down.

    `newest_R`, negative in rows that are idle, stand at `position_R`, and all tokens before have been read. The last
    pass only reads: should all guesses be right, nothing is missing for the next call.
    """
    R, D = wanted_RD.shape
    num_wanted_R = jnp.sum(wanted_RD >= 0, axis=1)
    rows = replace(rows, logprobs_R=jnp.zeros_like(rows.logprobs_R))

    def one_pass(i: jax.Array, carry: tuple[KVCache, jax.Array, jax.Array]) -> tuple[KVCache, jax.Array, jax.Array]:
        cache, newest_R, guesses_DR = carry
        at_R = jnp.where((newest_R >= 0) & (i <= num_wanted_R) & (num_wanted_R > 0), position_R + i, NOTHING)
        view, is_staged = PagedView((TileGroup(pages_RJ, at_R[:, None]),)), spec.seams.layers is not None
        attend = step_attention(view, spec.attention, is_staged=is_staged)
        x_RD, cache = decoder.hidden(jnp.maximum(newest_R, 0), jnp.maximum(at_R, 0), attend, cache)

        def choose() -> jax.Array:
            logits_RV = decoder.logits(x_RD)
            chosen_R, _ = sample(logits_RV, replace(rows, position_R=rows.position_R + i), slots)
            return jnp.where(jnp.isfinite(jnp.sum(logits_RV, axis=-1)) & (i < num_wanted_R), chosen_R, NOTHING)

        guess_R = jax.lax.cond(i < D, choose, lambda: jnp.full(R, NOTHING, jnp.int32))
        return cache, guess_R, jax.lax.dynamic_update_index_in_dim(guesses_DR, guess_R, i, 0)

    start = (cache, newest_R, jnp.full((D + 1, R), NOTHING, jnp.int32))
    cache, _, guesses_DR = jax.lax.fori_loop(0, D + 1, one_pass, start)
    return guesses_DR[:D].T, cache


def make_catch_up(spec: DraftSpec, treedef: Any, pages_per_slot: int) -> CatchUpFn:
    """A program that reads tokens, `catch_up(weights, cache, packed) -> cache`, of what `pack_chunks` packs."""
    J, Q = pages_per_slot, CATCH_UP_TILE

    def catch_up(weights: tuple[jax.Array, ...], cache: KVCache, packed: jax.Array) -> KVCache:
        pages_SJ, tokens_SQ, positions_SQ = packed[:, :J], packed[:, J : J + Q], packed[:, J + Q :]
        decoder = bind(spec.config, jax.tree.unflatten(treedef, weights), spec.seams)
        view, is_staged = PagedView((TileGroup(pages_SJ, positions_SQ),)), spec.seams.layers is not None
        attend = step_attention(view, spec.attention, is_staged=is_staged)
        _, cache = decoder.hidden(tokens_SQ.reshape(-1), jnp.maximum(positions_SQ, 0).reshape(-1), attend, cache)
        return cache

    return catch_up


def num_tiles(chunks: Iterable[Chunk]) -> int:
    """Tiles of a call that reads these chunks."""
    return sum(pages_for(chunk.length, CATCH_UP_TILE) for chunk in chunks)


def pack_chunks(chunks: Items[Chunk], table: PageTable, size: int) -> NDArray[np.int32]:
    """int32[size, pages_per_slot + 2 * CATCH_UP_TILE]: of each tile the page row of its sequence, tokens, and
    their positions, NOTHING where padded."""
    J, Q = table.pages_per_slot, CATCH_UP_TILE
    packed: NDArray[np.int32] = np.zeros((size, J + 2 * Q), np.int32)
    packed[:, J + Q :] = NOTHING
    tile = 0
    for chunk in chunks:
        for start in range(chunk.start, chunk.start + chunk.length, Q):
            end = min(start + Q, chunk.start + chunk.length)
            packed[tile, :J] = table.page_indices_WBJ[0, chunk.sequence.slot]
            packed[tile, J : J + end - start] = chunk.sequence.token_ids[start:end]
            packed[tile, J + Q : J + Q + end - start] = range(start, end)
            tile += 1
    return packed
