"""The TPU's kernel, interpreted on a CPU with its copies watched for races, equals the XLA form over ragged batches."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kv import tpu_copies, tpu_limits
from kv.paged_attention import PagedView, TileGroup, paged_attention
from kv.tpu_attention import tpu_attention
from kv.tpu_copies import TileCopies
from tests.pages import H, Q, assert_same_pages, in_sets, one_device, random_caches, random_step

pytestmark = pytest.mark.slow
# memory that nobody wrote is NaN; a copy is made when it is started, so that one that is not awaited is seen, too
WATCHED = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
RACE = "RACE DETECTED"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Sequences of a few pages already have several strips and blocks, and many heads are a loop."""
    monkeypatch.setattr(tpu_limits, "_STRIP_TOKENS", 16)
    monkeypatch.setattr(tpu_limits, "_BLOCK_BYTES", 1 << 17)
    monkeypatch.setattr(tpu_copies, "_FEW_ROWS", 2)


def both_forms(softcap, cores=1):
    watched = replace(WATCHED, num_cores_or_threads=cores)

    def kernel(q, k, v, cache, groups, window):
        attend = tpu_attention(in_sets(groups), one_device(cores), watched)
        return attend(q, k, v, cache, jnp.int32(3), window=window, softcap=softcap)

    def xla(q, k, v, cache, groups, window):
        return paged_attention(PagedView(groups))(q, k, v, cache, jnp.int32(1), window=window, softcap=softcap)

    return jax.jit(kernel, compiler_options={"xla_backend_optimization_level": 0}), jax.jit(xla)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "page_size", "pages_per_slot", "window", "softcap", "row", "kinds"),
    [
        ("float32", 6, 3, 8, 6, 19, 1.5, 2 * H, ("prefill",)),
        ("bfloat16", 8, 4, 16, 5, None, None, H, ("decode",)),
        ("float8_e4m3fn", 4, 2, 32, 3, 40, 1.5, H, ("decode",)),
        ("int8", 4, 1, 128, 2, None, None, H, ("decode", "prefill")),
    ],
)
def test_equals_the_xla_form_without_races(
    capsys, dtype, heads, kv_heads, page_size, pages_per_slot, window, softcap, row, kinds
):
    rng = np.random.default_rng(heads * page_size)
    kernel, xla = both_forms(softcap, cores=2 if dtype == "bfloat16" else 1)
    for _ in range(2 if kinds == ("prefill",) else 1):
        groups, num_pages = random_step(rng, page_size, pages_per_slot)
        groups = tuple(group for group, kind in zip(groups, ("decode", "prefill"), strict=True) if kind in kinds)
        cache, reference = random_caches(rng, dtype, num_pages, kv_heads, page_size, row)
        T = sum(group.positions_SQ.size for group in groups)
        q, k, v = (jnp.asarray(rng.standard_normal((T, n, H)), jnp.float32) for n in (heads, kv_heads, kv_heads))
        known = int(np.flatnonzero(np.concatenate([group.positions_SQ.reshape(-1) for group in groups]) >= 0)[3])
        k = k.at[known, kv_heads - 1, 3].set(jnp.nan)  # spoils its own token, and is not stored
        traced_window = None if window is None else jnp.int32(window)
        out, stored = kernel(q, k, v, cache, groups, traced_window)
        expected, also_stored = xla(q, k, v, reference, groups, traced_window)
        np.testing.assert_allclose(out, expected, atol=2e-2 if dtype == "bfloat16" else 2e-6)
        assert np.isnan(out[known]).any() and not np.asarray(out[0]).any()
        assert_same_pages(stored, also_stored)
    assert RACE not in capsys.readouterr().out


def test_a_tile_that_would_not_wait_for_the_one_before_is_seen(capsys, monkeypatch):
    """So that the test above cannot pass because nobody watches."""
    monkeypatch.setattr(TileCopies, "await_stores", lambda *_: None)
    pages, positions = jnp.asarray([[1, 2]] * 2, jnp.int32), jnp.arange(2 * Q, dtype=jnp.int32).reshape(2, Q)
    cache, _ = random_caches(np.random.default_rng(0), "float32", 3, 1, Q)
    kernel, _ = both_forms(None)
    x = jnp.ones((2 * Q, 1, H))
    jax.block_until_ready(kernel(x, x, x, cache, (TileGroup(pages, positions),), None))
    assert RACE in capsys.readouterr().out
