"""Penalties on tokens that a sequence holds already, from counts per slot that stay on the device.

The newest token is known to the device alone when the next one is chosen, so the device counts. One int32 per slot and
token: twice the times it stands in the answer, plus one if it stands in the prompt.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

IN_PROMPT = 1
IN_ANSWER = 2


def penalise(
    logits_RV: jax.Array,
    counts_RV: jax.Array,
    repetition_R: jax.Array,
    presence_R: jax.Array,
    frequency_R: jax.Array,
) -> jax.Array:
    """float32[R, V]: logits with the three penalties; where a count is 0 a logit stays as it is, bit for bit.

    Repetition (CTRL, Keskar et al. 2019, arXiv 1909.05858) divides positive and multiplies negative logits of tokens of
    prompt and answer. Presence and frequency (OpenAI) are subtracted, once and per occurrence, for the answer alone.
    """
    times_RV = (counts_RV >> 1).astype(jnp.float32)  # IN_ANSWER; a division takes a TPU's compiler 1.5 s
    repetition_R1 = repetition_R[:, None]
    repeated_RV = jnp.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    logits_RV = jnp.where(counts_RV > 0, repeated_RV, logits_RV)
    return logits_RV - frequency_R[:, None] * times_RV - presence_R[:, None] * jnp.minimum(times_RV, 1.0)


def count_chosen(counts_BV: jax.Array, slot_R: jax.Array, token_R: jax.Array, counted_R: jax.Array) -> jax.Array:
    """Counts with one more occurrence of each row's token, where `counted_R`. R writes, in place when donated."""
    slot_R = jnp.where(counted_R, slot_R, counts_BV.shape[0])  # beyond the last slot: dropped
    return counts_BV.at[slot_R, token_R].add(IN_ANSWER, mode="drop")


def sparse_counts(prompt: Sequence[int], answer: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The counts of one sequence as (token ids, counts), each id once."""
    ids, where = np.unique(np.asarray([*prompt, *answer], np.int32), return_inverse=True)
    counts = np.zeros(len(ids), np.int32)
    counts[where[: len(prompt)]] = IN_PROMPT
    np.add.at(counts, where[len(prompt) :], IN_ANSWER)
    return ids, counts
