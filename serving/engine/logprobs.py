"""Log-probabilities of chosen tokens and of their most likely rivals.

They are those of the model's own distribution: before temperature, penalties, biases and filters, as OpenAI reports
them. So they do not change with how a token was chosen, and a banned token can show up among the rivals.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from serving.engine.api import TokenLogprobs
from serving.engine.largest import largest, largest_by_turns
from serving.request import MAX_LOGPROBS

WIDTH = 1 + MAX_LOGPROBS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowLogprobs:
    """Of R rows: column 0 is the chosen token, the others are the most likely ones, falling."""

    ids_RX: jax.Array
    """int32[R, 1 + MAX_LOGPROBS]; id 0 beyond a small vocabulary, with -inf."""
    logprobs_RX: jax.Array
    """float32, natural logarithms."""

    def start_copy(self) -> "RowLogprobs":
        """Let them start their way to the host."""
        self.ids_RX.copy_to_host_async()
        self.logprobs_RX.copy_to_host_async()
        return self

    def read(self, wanted: Mapping[int, int | None]) -> dict[int, tuple[TokenLogprobs, ...]]:
        """One entry per row that wants a number of rivals, which may be 0; waits for the device."""
        ids_RX, logprobs_RX = np.asarray(self.ids_RX), np.asarray(self.logprobs_RX)
        return {row: (entry(ids_RX[row], logprobs_RX[row], top),) for row, top in wanted.items() if top is not None}


def row_logprobs(logits_RV: jax.Array, chosen_R: jax.Array, vocab_shards: int = 1) -> RowLogprobs:
    """Of the softmax of the logits as they come. Ties are in the order of token ids."""
    num_top = min(MAX_LOGPROBS, logits_RV.shape[1])
    top_RX = jax.lax.platform_dependent(
        logits_RV,
        cpu=lambda logits_RV: largest(logits_RV, num_top, vocab_shards)[1],
        default=lambda logits_RV: largest_by_turns(logits_RV, num_top),
    )
    ids_RX = jnp.concatenate([chosen_R[:, None], top_RX], axis=1)
    total_R1 = jax.nn.logsumexp(logits_RV, axis=1, keepdims=True)
    # One gather for the chosen and the others: the same token must not get two values, rounded differently.
    logprobs_RX = jnp.take_along_axis(logits_RV, ids_RX, axis=1, mode="promise_in_bounds") - total_R1
    missing = ((0, 0), (0, MAX_LOGPROBS - num_top))
    return RowLogprobs(jnp.pad(ids_RX, missing), jnp.pad(logprobs_RX, missing, constant_values=-jnp.inf))


def no_logprobs(num_rows: int) -> RowLogprobs:
    """What a step returns when nobody asked."""
    return RowLogprobs(jnp.zeros((num_rows, WIDTH), jnp.int32), jnp.zeros((num_rows, WIDTH), jnp.float32))


def entry(ids_X: NDArray[np.int32], logprobs_X: NDArray[np.float32], num_top: int, *, rank: int = 0) -> TokenLogprobs:
    """One row on the host, with as many rivals as the request wants and the vocabulary has."""
    top = zip(ids_X[1 : 1 + num_top].tolist(), logprobs_X[1 : 1 + num_top].tolist(), strict=True)
    return TokenLogprobs(float(logprobs_X[0]), tuple(pair for pair in top if pair[1] != -np.inf), rank)
