"""Seams: what the decoder does over several devices in another way than over one. The model knows no mesh: who has one
gives these functions (`sharding.seams`), as it gives attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from model.attention import AttentionFn
from model.layers import RopeTable

TokenTables = tuple[RopeTable, jax.Array | None]
"""What layers are told of each token: the ropes, and the number of its adapter where there are any."""

LayerBody = Callable[[Any, Any, jax.Array, AttentionFn, TokenTables], Any]
"""(carry, parameters of a layer, its number, attention, tables) -> carry: the tokens' x_TD and the cache."""

LayersFn = Callable[[LayerBody, Any, Any, int, AttentionFn, TokenTables], Any]
"""(body, carry, stacked parameters, number of layers, attention, tables) -> carry after all layers. A body uses no
other arrays. Over stages the attention must be a `StagedAttention`."""

LookUpFn = Callable[[jax.Array, jax.Array], jax.Array]
"""(table with a row for each token of the vocabulary, tokens) -> their rows."""

ExpertsFn = Callable[[jax.Array, jax.Array, jax.Array, Any, Any, str], jax.Array]
"""As `model.experts.run_experts`."""


class StagedAttention(AttentionFn, Protocol):
    """An AttentionFn that is a tree of arrays, as `kv.paged_attention.StepAttention`."""

    def only_if(self, is_live: jax.Array) -> AttentionFn:
        """The same, but if `is_live`, a bool scalar, is not true: then it stores nothing."""
        ...


def _as_they_are(x: jax.Array) -> jax.Array:
    return x


def rows_at_once(table_VD: jax.Array, tokens_T: jax.Array) -> jax.Array:
    return table_VD[tokens_T]


@dataclass(frozen=True, slots=True)
class Seams:
    """The defaults are those of one device, or of several among which XLA shares out the work."""

    layers: LayersFn | None = None
    """None scans them."""
    experts: ExpertsFn | None = None
    look_up: LookUpFn = rows_at_once
    rows: Callable[[jax.Array], jax.Array] = _as_they_are
    """Says where the rows of an array lie; its first axis is tokens, or what they come in."""


ONE_DEVICE = Seams()
