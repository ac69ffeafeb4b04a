"""Verification of guesses on the device: how many leading ones the model would have chosen itself.

Speculative sampling (Leviathan et al. 2023, arXiv 2211.17192) accepts a guessed token x with probability p(x) if the
proposal is certain of it, and else draws from p without x. Drawing y from p and accepting x if y = x is just that:
y = x has probability p(x), and given y != x it is distributed as p without x. Since a draw is a function of seed and
position alone, the answer with guesses even equals the answer without them, token by token.
"""

import jax
import jax.numpy as jnp

from serving.engine.batch import NOT_FINITE
from serving.engine.sampling import RowSampling
from serving.engine.trips import ENDED


def draft_rows(rows: RowSampling, num_queries: int) -> RowSampling:
    """The sampling of each row at `num_queries` positions that follow each other, [R * Q]."""
    spread = jax.tree.map(lambda leaf: jnp.repeat(leaf, num_queries, axis=0), rows)
    ahead = jnp.tile(jnp.arange(num_queries, dtype=jnp.int32), rows.position_R.shape[0])
    return RowSampling(**{**vars(spread), "position_R": spread.position_R + ahead})


def accept(
    chosen_RQ: jax.Array, drafts_RD: jax.Array, broken_RQ: jax.Array, is_sampled_R: jax.Array, stops_RK: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What a row gets of the tokens that the model chose behind its newest one and behind each guess, Q = D + 1.

    Returns int32[R, Q], the right guesses and the token after them, then ENDED; NOT_FINITE where the model broke down.
    And int32[R]: the last of them, or ENDED if the row ends with any. Guesses that are missing are negative.
    """
    is_right_RD = (chosen_RQ[:, :-1] == drafts_RD) & ~broken_RQ[:, :-1]
    num_right_R1 = jnp.sum(jnp.cumprod(is_right_RD.astype(jnp.int32), axis=1), axis=1, keepdims=True)
    is_given_RQ = (jnp.arange(chosen_RQ.shape[1]) <= num_right_R1) & is_sampled_R[:, None]
    ends_RQ = (chosen_RQ[:, :, None] == stops_RK[:, None]).any(axis=2) | broken_RQ
    newest_R = jnp.take_along_axis(chosen_RQ, num_right_R1, axis=1)[:, 0]
    tokens_RQ = jnp.where(is_given_RQ, jnp.where(broken_RQ, NOT_FINITE, chosen_RQ), ENDED)
    return tokens_RQ, jnp.where((ends_RQ & is_given_RQ).any(axis=1), ENDED, newest_R)
