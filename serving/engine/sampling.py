"""Choose one token per row on the device: edits and penalties, then greedy or temperature with top-k, top-p and min-p.

One program for all: a batch of plain greedy rows pays for an argmax only. Biases and bans come first, then penalties
(vLLM's order), and both also steer greedy rows. Randomness is a function of (seed, position) alone, so that an answer
does not depend on its neighbours in the batch or on having been preempted.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from serving.engine.edits import apply_edits
from serving.engine.filters import lowest_kept
from serving.engine.largest import first_largest
from serving.engine.logprobs import RowLogprobs, no_logprobs, row_logprobs
from serving.engine.masks import keep_allowed
from serving.engine.noise import gumbel
from serving.engine.penalties import penalise
from serving.engine.slot_state import SlotState

LANES = 128  # tokens per block of a draw
MOST_ROWS = 128  # of which more than an argmax is asked at once: for 256 a TPU's compiler takes twice as long


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of R rows."""

    temperature_R: jax.Array
    """float32, 0 for greedy."""
    top_k_R: jax.Array
    """int32, 0 for all."""
    top_p_R: jax.Array
    """float32 in (0, 1]."""
    min_p_R: jax.Array
    """float32 in [0, 1]."""
    seed_R2: jax.Array
    """uint32: high and low half of each row's 64-bit seed."""
    position_R: jax.Array
    """int32: index in its sequence of the token to choose."""
    slot_R: jax.Array
    """int32: where in the SlotState the row's counts and edits are."""
    repetition_R: jax.Array
    """float32 above 0; 1 changes nothing. This and the next two are read where `counted_R`."""
    presence_R: jax.Array
    """float32, 0 for none."""
    frequency_R: jax.Array
    """float32, 0 for none."""
    counted_R: jax.Array
    """bool: the slot keeps counts, since some penalty is set."""
    num_edits_R: jax.Array
    """int32: edits of the slot's table; what lies behind is a former owner's."""
    logprobs_R: jax.Array
    """bool: log-probabilities are wanted."""
    masked_R: jax.Array
    """bool: `masks_RW` says which tokens are possible."""
    masks_RW: jax.Array | None = None
    """int32, one bit per token; see `masks`. None: no row can be masked."""
    vocab_shards: int = field(default=1, metadata={"static": True})
    """Parts of the vocabulary that lie on different devices."""

    @property
    def is_edited(self) -> jax.Array:
        """bool scalar: whether any row has penalties or edits."""
        return jnp.any(self.counted_R | (self.num_edits_R > 0))

    @property
    def is_masked(self) -> jax.Array:
        """bool scalar: whether any row has a mask."""
        return jnp.any(self.masked_R)


def sample(logits_RV: jax.Array, rows: RowSampling, state: SlotState) -> tuple[jax.Array, RowLogprobs]:
    """int32[R] and their log-probabilities, which are zeros unless some row wants them. Ties: the lower token id."""
    num_rows = logits_RV.shape[0]

    def plain() -> tuple[jax.Array, RowLogprobs]:
        return _greedy(logits_RV), no_logprobs(num_rows)

    def careful() -> tuple[jax.Array, RowLogprobs]:
        if num_rows <= MOST_ROWS or num_rows % MOST_ROWS:
            return _sample_carefully(logits_RV, rows, state)
        blocks = jax.tree.map(lambda leaf: leaf.reshape(-1, MOST_ROWS, *leaf.shape[1:]), (logits_RV, rows))
        told = jax.lax.map(lambda block: _sample_carefully(block[0], block[1], state), blocks)
        return jax.tree.map(lambda leaf: leaf.reshape(num_rows, *leaf.shape[2:]), told)

    is_plain = ~(rows.is_edited | rows.is_masked | jnp.any((rows.temperature_R > 0) | rows.logprobs_R))
    return jax.lax.cond(is_plain, plain, careful)


def _sample_carefully(logits_RV: jax.Array, rows: RowSampling, state: SlotState) -> tuple[jax.Array, RowLogprobs]:
    edited_RV = jax.lax.cond(rows.is_edited, lambda: _edit(logits_RV, rows, state), lambda: logits_RV)
    chosen_R = _choose(_mask(edited_RV, rows), rows)
    return chosen_R, jax.lax.cond(
        jnp.any(rows.logprobs_R),
        lambda: row_logprobs(logits_RV, chosen_R, rows.vocab_shards),
        lambda: no_logprobs(logits_RV.shape[0]),
    )


def _greedy(logits_RV: jax.Array) -> jax.Array:
    """The argmax. A CPU takes the largest of a block as a vector, but an argmax number by number; where devices share
    the vocabulary, blocks would have to be sent around."""
    return jax.lax.platform_dependent(logits_RV, cpu=_greedy_by_blocks, default=first_largest)


def _greedy_by_blocks(logits_RV: jax.Array) -> jax.Array:
    blocks_RCL = _in_blocks(logits_RV, -jnp.inf)
    block_R = jnp.argmax(jnp.max(blocks_RCL, axis=-1), axis=-1)
    return _token(block_R, jnp.argmax(_block(blocks_RCL, block_R), axis=-1))


def _edit(logits_RV: jax.Array, rows: RowSampling, state: SlotState) -> jax.Array:
    logits_RV = apply_edits(logits_RV, state.edits_B3E[rows.slot_R], rows.num_edits_R, rows.position_R)
    counts_RV = jnp.where(rows.counted_R[:, None], _rows_of(state.counts_BV, rows.slot_R), 0)
    return penalise(logits_RV, counts_RV, rows.repetition_R, rows.presence_R, rows.frequency_R)


def _rows_of(counts_BV: jax.Array, slot_R: jax.Array) -> jax.Array:
    """Row after row: to gather them at once takes a TPU's compiler 15 seconds."""
    return jax.lax.platform_dependent(
        counts_BV,
        slot_R,
        cpu=lambda counts_BV, slot_R: counts_BV[slot_R],
        default=lambda counts_BV, slot_R: jax.lax.map(lambda slot: counts_BV[slot], slot_R),
    )


def _mask(logits_RV: jax.Array, rows: RowSampling) -> jax.Array:
    """Last, so that nothing makes possible what a grammar excludes."""
    masks_RW = rows.masks_RW
    if masks_RW is None:
        return logits_RV
    return jax.lax.cond(rows.is_masked, lambda: keep_allowed(logits_RV, rows.masked_R, masks_RW), lambda: logits_RV)


def _choose(logits_RV: jax.Array, rows: RowSampling) -> jax.Array:
    greedy_R = _greedy(logits_RV)

    def draw() -> jax.Array:
        return jnp.where(rows.temperature_R > 0, _draw(logits_RV, rows), greedy_R)

    return jax.lax.cond(jnp.any(rows.temperature_R > 0), draw, lambda: greedy_R)


def _draw(logits_RV: jax.Array, rows: RowSampling) -> jax.Array:
    """A Gumbel-max (Gumbel 1954; Maddison et al. 2014) over logarithms of probability mass, so no sum can be rounded in
    a way that lets a token without mass be drawn."""
    noise_of = rows.seed_R2, rows.position_R
    return jax.lax.platform_dependent(_log_mass(logits_RV, rows), *noise_of, cpu=draw_by_blocks, default=draw_from_all)


def draw_from_all(log_mass_RV: jax.Array, seed_R2: jax.Array, position_R: jax.Array) -> jax.Array:
    """One draw of V: noise costs an accelerator nothing, and devices that share the vocabulary send a token each."""
    noise_RV = gumbel(seed_R2, position_R, log_mass_RV.shape[1])
    # Behind a barrier: computed again in another fusion, the largest might be rounded otherwise, and be none's equal.
    return first_largest(jax.lax.optimization_barrier(log_mass_RV + noise_RV))


def draw_by_blocks(log_mass_RV: jax.Array, seed_R2: jax.Array, position_R: jax.Array) -> jax.Array:
    """First a block of tokens by its share, then a token of that block: two draws of a few hundred, not one of V."""
    mass_RCL = _in_blocks(jnp.exp(log_mass_RV), 0.0)
    share_RC = jnp.sum(mass_RCL, axis=-1)
    num_blocks = share_RC.shape[1]
    noise_RX = gumbel(seed_R2, position_R, num_blocks + LANES)
    block_R = jnp.argmax(jnp.log(share_RC) + noise_RX[:, :num_blocks], axis=-1)
    lane_R = jnp.argmax(jnp.log(_block(mass_RCL, block_R)) + noise_RX[:, num_blocks:], axis=-1)
    return _token(block_R, lane_R)


def _log_mass(logits_RV: jax.Array, rows: RowSampling) -> jax.Array:
    """Logarithms of probabilities that are not normalised, -inf for what the filters exclude."""
    hot_R = jnp.where(rows.temperature_R > 0, rows.temperature_R, 1.0)
    floor_R = jax.lax.cond(
        jnp.any((rows.top_k_R > 0) | (rows.top_p_R < 1) | (rows.min_p_R > 0)),
        lambda: lowest_kept(logits_RV, hot_R, rows.top_k_R, rows.top_p_R, rows.min_p_R, rows.vocab_shards),
        lambda: jnp.full(hot_R.shape, -jnp.inf),
    )
    log_mass_RV = (logits_RV - jnp.max(logits_RV, axis=-1, keepdims=True)) / hot_R[:, None]
    # The cut compares logits as they came. Scaled ones may be computed once more in another fusion and rounded
    # differently there, which could cut even the most likely token.
    return jnp.where(logits_RV >= floor_R[:, None], log_mass_RV, -jnp.inf)


def _in_blocks(x_RV: jax.Array, fill: float) -> jax.Array:
    """[R, blocks, LANES], filled up at the end."""
    R, V = x_RV.shape
    return jnp.pad(x_RV, ((0, 0), (0, -V % LANES)), constant_values=fill).reshape(R, -1, LANES)


def _block(blocks_RCL: jax.Array, block_R: jax.Array) -> jax.Array:
    return jnp.take_along_axis(blocks_RCL, block_R[:, None, None], axis=1, mode="promise_in_bounds")[:, 0]


def _token(block_R: jax.Array, lane_R: jax.Array) -> jax.Array:
    return (block_R * LANES + lane_R).astype(jnp.int32)
