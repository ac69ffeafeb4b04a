"""Trips: the passes of a decode call. Each gives every row that goes on one token; the loop ends when no row does.

A row ends on the device when it samples one of its stop ids, and its slot then remembers ENDED instead of a token: also
the next call, which was dispatched before the host knew, does nothing for it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kv.cache import KVCache
from serving.engine.logprobs import RowLogprobs, no_logprobs

ENDED = -1
"""In place of a token: none."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TripState:
    """What one trip hands on to the next."""

    cache: KVCache
    newest_R: jax.Array
    """int32: each row's newest token, or ENDED."""
    counts_BV: jax.Array
    """Of all slots; see `penalties`."""


Trip = Callable[[jax.Array, TripState], tuple[jax.Array, RowLogprobs, TripState]]
"""(number of the trip, state) -> tokens int32[R], ENDED where a row got none; log-probabilities; the new state."""


def run_trips(
    trip: Trip, num_trips_R: jax.Array, state: TripState, max_trips: int
) -> tuple[jax.Array, RowLogprobs, TripState]:
    """Trips until every row has had its `num_trips_R`, at most `max_trips`, or has ended. `state` is updated in place.

    Returns the tokens, int32[R, max_trips], with ENDED behind each row's last, and the last trip's log-probabilities.
    """
    R = num_trips_R.shape[0]
    start = (jnp.int32(0), jnp.full((max_trips, R), ENDED, jnp.int32), no_logprobs(R), state)

    def goes_on(carry: tuple[jax.Array, jax.Array, RowLogprobs, TripState]) -> jax.Array:
        i, *_, state = carry
        return jnp.any((i < num_trips_R) & (state.newest_R != ENDED))

    def body(
        carry: tuple[jax.Array, jax.Array, RowLogprobs, TripState],
    ) -> tuple[jax.Array, jax.Array, RowLogprobs, TripState]:
        i, tokens_IR, _, state = carry
        tokens_R, logprobs, state = trip(i, state)
        return i + 1, jax.lax.dynamic_update_index_in_dim(tokens_IR, tokens_R, i, 0), logprobs, state

    _, tokens_IR, logprobs, state = jax.lax.while_loop(goes_on, body, start)
    return tokens_IR.T, logprobs, state
