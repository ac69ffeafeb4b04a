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
BLOCK = 16
FOR_EVER = 2**31 - 1
NO_EDITS: NDArray[np.int32] = np.zeros((3, 0), np.int32)


def apply_edits(logits_RV: jax.Array, edits_R3E: jax.Array, num_edits_R: jax.Array, position_R: jax.Array) -> jax.Array:
    """float32[R, V]: logits plus the first `num_edits_R` edits of each row that still count.

    Visits blocks of edits up to the longest table of the batch, so that the work follows what was asked.
    """
    R = logits_RV.shape[0]
    rows_R1 = jnp.arange(R)[:, None]

    def body(block: jax.Array, logits_RV: jax.Array) -> jax.Array:
        at = block * BLOCK
        edits_R3C = jax.lax.dynamic_slice(edits_R3E, (0, 0, at), (R, 3, BLOCK))
        ids_RC, until_RC = edits_R3C[:, 0], edits_R3C[:, 2]
        numbers_RC = jax.lax.bitcast_convert_type(edits_R3C[:, 1], jnp.float32)
        counts_RC = (at + jnp.arange(BLOCK) < num_edits_R[:, None]) & (position_R[:, None] < until_RC)
        return logits_RV.at[rows_R1, ids_RC].add(jnp.where(counts_RC, numbers_RC, 0.0), mode="drop")

    return jax.lax.fori_loop(0, (jnp.max(num_edits_R) + BLOCK - 1) // BLOCK, body, logits_RV)


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
