"""TilePlan: what the TPU's kernel must know of a step's tiles: the same for all layers, so it is made before them."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from kv.paged_attention import TileGroup


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TilePlan:
    pages: jax.Array
    """int32[S * J]; of several sets of layers [W, S * J]."""
    first_S: jax.Array
    """int32: position of each tile's first token."""
    count_S: jax.Array
    """int32: tokens of each tile."""
    next_S: jax.Array
    """int32: the next tile of the same part that has tokens, S if none has."""
    is_apart_S: jax.Array
    """int32: 1 where that tile is of another sequence."""
    tile_tokens: int = field(metadata={"static": True})
    num_parts: int = field(metadata={"static": True})
    """Runs of tiles that may be served side by side."""

    @property
    def num_tiles(self) -> int:
        return int(self.first_S.shape[0])

    @property
    def pages_per_slot(self) -> int:
        return int(self.pages.shape[-1]) // self.num_tiles

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return self.pages, self.first_S, self.count_S, self.next_S, self.is_apart_S

    def of_set(self, number: jax.Array) -> "TilePlan":
        return replace(self, pages=self.pages[number])


def plan_tiles(group: TileGroup, num_cores: int) -> TilePlan:
    """Of one group. Tiles of one token, all of different sequences, are shared out among the cores of a device."""
    S, Q = group.positions_SQ.shape
    num_parts = num_cores if Q == 1 and S % num_cores == 0 else 1
    count_S = jnp.sum(group.positions_SQ >= 0, axis=1, dtype=jnp.int32)
    next_S = _next_with_tokens(count_S, num_parts)
    sets = group.pages_SJ.shape[:-2]
    pages_SJ = group.pages_SJ[0] if sets else group.pages_SJ  # in any set, sequences have pages of their own
    pages_after_SJ = pages_SJ[jnp.minimum(next_S, S - 1)]
    return TilePlan(
        pages=group.pages_SJ.reshape(*sets, -1),
        first_S=jnp.maximum(group.positions_SQ[:, 0], 0),
        count_S=count_S,
        next_S=next_S,
        is_apart_S=jnp.any(pages_SJ != pages_after_SJ, axis=1).astype(jnp.int32),
        tile_tokens=Q,
        num_parts=num_parts,
    )


def _next_with_tokens(count_S: jax.Array, num_parts: int) -> jax.Array:
    """Each tile is compared with all others of its part: a TPU's compiler takes a second for a running minimum."""
    S = count_S.shape[0]
    own_S = jnp.where(count_S > 0, jnp.arange(S, dtype=jnp.int32), S)
    own_PI = own_S.reshape(num_parts, -1)
    at_I = jnp.arange(own_PI.shape[1])
    return jnp.min(jnp.where(at_I > at_I[:, None], own_PI[:, None], S), axis=2).reshape(S)
