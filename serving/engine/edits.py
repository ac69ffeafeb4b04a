"""Edits: numbers added to single logits of one sequence, as a short table per slot.

An edit is (token id, number, until): it counts while the token to choose has a position below `until`. So one table
serves logit_bias and banned ids (-inf, for ever) and min_tokens (-inf on what would end the answer, for a while).
"""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from serving.errors import InvalidRequest
from serving.request import SamplingParams

MAX_EDITS = 512
FOR_EVER = 2**31 - 1
NO_EDITS: NDArray[np.int32] = np.zeros((3, 0), np.int32)


def apply_edits(logits_RV: jax.Array, edits_R3E: jax.Array, num_edits_R: jax.Array, position_R: jax.Array) -> jax.Array:
    """float32[R, V]: logits plus the first `num_edits_R` edits of each row that still count.

    One edit of each row after the other, up to the longest table of the batch, so that the work follows what was asked.
    (Several of a row at once take a TPU's compiler twelve times as long.)
    """
    rows_R = jnp.arange(logits_RV.shape[0])

    def body(at: jax.Array, logits_RV: jax.Array) -> jax.Array:
        edit_R3 = jax.lax.dynamic_index_in_dim(edits_R3E, at, axis=2, keepdims=False)
        id_R, number_R = edit_R3[:, 0], jax.lax.bitcast_convert_type(edit_R3[:, 1], jnp.float32)
        counts_R = (at < num_edits_R) & (position_R < edit_R3[:, 2])
        return logits_RV.at[rows_R, id_R].add(jnp.where(counts_R, number_R, 0.0), mode="drop")

    return jax.lax.fori_loop(0, jnp.max(num_edits_R), body, logits_RV)


def build_edits(params: SamplingParams, stop_ids: frozenset[int], num_prompt: int) -> NDArray[np.int32]:
    """The table of one sequence, int32[3, edits]; numbers are float32 bits. Raises InvalidRequest if it is too long."""
    biased = {token_id: (bias, FOR_EVER) for token_id, bias in params.logit_bias}
    banned = dict.fromkeys(params.banned_token_ids, (-np.inf, FOR_EVER))
    rows = [(token_id, *edit) for token_id, edit in (biased | banned).items()]
    if params.min_tokens:
        rows += [(token_id, -np.inf, num_prompt + params.min_tokens) for token_id in sorted(stop_ids)]
    if len(rows) > MAX_EDITS:
        raise InvalidRequest(
            f"logit_bias, banned_token_ids and what min_tokens holds back are {len(rows):,} tokens together, "
            f"at most {MAX_EDITS} are possible.",
            param="logit_bias",
        )
    if not rows:
        return NO_EDITS
    ids, numbers, until = zip(*rows, strict=True)
    bits = np.asarray(numbers, np.float32).view(np.int32)
    return np.stack([np.asarray(ids, np.int32), bits, np.asarray(until, np.int32)])
