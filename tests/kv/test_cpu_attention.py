"""The CPU's decode kernel equals the XLA form, over ragged batches, page borders, types and empty rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kv import cpu_attention
from kv.cache import ColumnCache
from kv.paged_attention import PagedView, TileGroup, paged_attention
from model.bits import as_bits

pytestmark = pytest.mark.slow
LAYERS, PAGES, H, J = 2, 500, 32, 40


@pytest.fixture(scope="module", autouse=True)
def registered():
    for dtype in cpu_attention.DTYPES:
        cpu_attention.register(dtype)


def attend(kernel, q, k, v, cache, group, window=None, softcap=None):
    def run(q, k, v, cache, group):
        attention = paged_attention(PagedView((group,)), kernel)
        return attention(q, k, v, cache, jnp.int32(1), window=window, softcap=softcap)

    return jax.jit(run)(q, k, v, cache, group)


def random_cache(rng, dtype, kv_heads, page_size):
    keys, values = ((LAYERS, PAGES, kv_heads, *ends) for ends in ((H, page_size), (page_size, H)))
    return ColumnCache(*(as_bits(jnp.asarray(rng.standard_normal(shape), dtype)) for shape in (keys, values)))


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "page_size", "window", "softcap"),
    [
        ("float32", 4, 4, 1, None, None),
        ("float32", 9, 3, 16, None, None),
        ("float32", 8, 1, 4, 37, None),
        ("float32", 8, 4, 16, 16, 1.5),
        ("bfloat16", 9, 3, 4, None, 1.5),
        ("bfloat16", 4, 2, 16, None, None),
    ],
)
def test_equals_the_xla_form(dtype, heads, kv_heads, page_size, window, softcap):
    rng = np.random.default_rng(heads * page_size)
    lengths = [0, 1, page_size, page_size + 1, J * page_size, *rng.integers(1, J * page_size, 6)]
    S = len(lengths)
    cache = random_cache(rng, dtype, kv_heads, page_size)
    pages = 1 + rng.permutation(S * J).reshape(S, J)  # each row writes into its own
    group = TileGroup(jnp.asarray(pages, jnp.int32), jnp.asarray(lengths, jnp.int32)[:, None] - 1)
    q, k, v = (jnp.asarray(rng.standard_normal((S, n, H)), jnp.float32) for n in (heads, kv_heads, kv_heads))
    (ours, stored), (expected, also_stored) = (
        attend(kernel, q, k, v, cache, group, window, softcap) for kernel in (cpu_attention.decode_attention, None)
    )
    np.testing.assert_allclose(ours, expected, atol=2e-6 if dtype == "float32" else 2e-2)
    assert not ours[0].any(), "an empty row gives zeros"
    for kernels, xlas in zip(jax.tree.leaves(stored), jax.tree.leaves(also_stored), strict=True):
        np.testing.assert_array_equal(kernels[:, 1:], xlas[:, 1:])  # of the null page nobody cares


def test_what_is_not_finite_spoils_its_own_kv_head_and_is_not_stored():
    rng = np.random.default_rng(0)
    cache = random_cache(rng, "float32", 2, 4)
    group = TileGroup(jnp.asarray([[1, 2], [3, 4]], jnp.int32), jnp.asarray([[5], [6]], jnp.int32))
    q, k, v = (jnp.asarray(rng.standard_normal((2, n, H)), jnp.float32) for n in (4, 2, 2))
    k = k.at[0, 1, 3].set(jnp.nan)
    (ours, stored), (expected, also_stored) = (
        attend(kernel, q, k, v, cache, group) for kernel in (cpu_attention.decode_attention, None)
    )
    np.testing.assert_allclose(ours, expected, atol=2e-6)
    assert np.isnan(ours[0, 2:]).all() and np.isfinite(ours[0, :2]).all() and np.isfinite(ours[1]).all()
    jax.tree.map(np.testing.assert_array_equal, stored, also_stored)


def test_large_scores_do_not_overflow():
    cache = ColumnCache(jnp.full((2, 3, 1, H, 4), 50.0), jnp.full((2, 3, 1, 4, H), 1.5))
    group = TileGroup(jnp.asarray([[1, 2]], jnp.int32), jnp.asarray([[6]], jnp.int32))
    q, k, v = jnp.full((1, 2, H), 50.0), jnp.full((1, 1, H), 50.0), jnp.full((1, 1, H), 1.5)
    out, _ = attend(cpu_attention.decode_attention, q, k, v, cache, group)
    np.testing.assert_allclose(np.asarray(out), 1.5, rtol=1e-6)


def test_the_pool_is_neither_copied_nor_moved():
    """Called inside a scan that carries the pool: the step's temporaries stay far below the pool."""
    cache = ColumnCache(jnp.zeros((LAYERS, 4_000, 2, H, 4)), jnp.zeros((LAYERS, 4_000, 2, 4, H)))
    group = TileGroup(jnp.ones((4, J), jnp.int32), jnp.full((4, 1), 9, jnp.int32))
    qkv = jnp.ones((4, 4, H)), jnp.ones((4, 2, H)), jnp.ones((4, 2, H))

    def layers(q, k, v, cache):
        attend = paged_attention(PagedView((group,)), cpu_attention.decode_attention)
        return jax.lax.scan(lambda c, i: (attend(q, k, v, c, i)[1], None), cache, jnp.arange(LAYERS))[0]

    memory = jax.jit(layers, donate_argnums=3).lower(*qkv, cache).compile().memory_analysis()
    pool_bytes = cache.k_LPKHG.nbytes + cache.v_LPKGH.nbytes
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 100
