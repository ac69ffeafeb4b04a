"""Which tile follows which, and whether it may be fetched at once."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.paged_attention import TileGroup
from kv.tpu_plan import plan_tiles

S, Q, J = 6, 2, 2
plan = jax.jit(plan_tiles, static_argnums=1)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=S, max_size=S),
    st.sampled_from([(1, 2), (1, 1), (2, 2)]),
)
def test_tiles_follow_each_other_within_their_part(tiles, kind):
    """Of each tile its sequence and its number of tokens. Only tiles of one token are shared out."""
    tile_tokens, cores = kind
    counts = [min(count, tile_tokens) for _, count in tiles]
    positions = [[4 if i < count else -1 for i in range(tile_tokens)] for count in counts]
    rows = [[1 + sequence, 9] for sequence, _ in tiles]
    made = plan(TileGroup(jnp.asarray(rows, jnp.int32), jnp.asarray(positions, jnp.int32)), cores)
    next_S, is_apart_S = np.asarray(made.next_S), np.asarray(made.is_apart_S)
    per_part = S // (cores if tile_tokens == 1 else 1)
    assert made.num_parts * per_part == S
    np.testing.assert_array_equal(made.count_S, counts)
    for tile in range(S):
        end = (tile // per_part + 1) * per_part
        after = next((other for other in range(tile + 1, end) if counts[other]), S)
        assert next_S[tile] == after
        if after < S:
            assert is_apart_S[tile] == (rows[tile] != rows[after])
