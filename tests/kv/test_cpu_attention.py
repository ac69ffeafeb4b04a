"""The CPU's decode kernel equals the XLA form, over ragged batches, page borders, types and empty rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kv import cpu_attention
from kv.cache import KVCache
from kv.paged_attention import PagedView, TileGroup, paged_attention

LAYERS, PAGES, H, J = 2, 90, 32, 40


@pytest.fixture(scope="module", autouse=True)
def registered():
    cpu_attention.register()


def attend(kernel, q, k, v, cache, group):
    def run(q, k, v, cache, group):
        return paged_attention(PagedView((group,)), kernel)(q, k, v, cache, jnp.int32(1))[0]

    return np.asarray(jax.jit(run)(q, k, v, cache, group))


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "page_size"),
    [
        ("float32", 4, 4, 1),
        ("float32", 9, 3, 16),
        ("float32", 8, 1, 4),
        ("bfloat16", 9, 3, 4),
        ("bfloat16", 4, 2, 16),
    ],
)
def test_equals_the_xla_form(dtype, heads, kv_heads, page_size):
    rng = np.random.default_rng(heads * page_size)
    lengths = [0, 1, page_size, page_size + 1, J * page_size, *rng.integers(1, J * page_size, 6)]
    S = len(lengths)
    shape = (LAYERS, PAGES, kv_heads, page_size, H)
    cache = KVCache(*(jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2)))
    pages = jnp.asarray(rng.integers(1, PAGES, (S, J)), jnp.int32)
    group = TileGroup(pages, jnp.asarray(lengths, jnp.int32)[:, None] - 1)
    # Rows share pages here, so all write the same key and value: who is last must not matter.
    k, v = (jnp.ones((S, kv_heads, H)) * x for x in (0.3, -0.7))
    q = jnp.asarray(rng.standard_normal((S, heads, H)), jnp.float32)
    ours, expected = (attend(kernel, q, k, v, cache, group) for kernel in (cpu_attention.decode_attention, None))
    np.testing.assert_allclose(ours, expected, atol=2e-6 if dtype == "float32" else 2e-2)
    assert not ours[0].any(), "an empty row gives zeros"


def test_large_scores_do_not_overflow():
    cache = KVCache(*(jnp.full((1, 3, 1, 4, H), x) for x in (50.0, 1.5)))
    group = TileGroup(jnp.asarray([[1, 2]], jnp.int32), jnp.asarray([[6]], jnp.int32))
    q = jnp.full((1, 2, H), 50.0)
    out = jax.jit(cpu_attention.decode_attention)(q, cache, jnp.int32(0), group.pages_SJ, group.positions_SQ[:, 0])
    np.testing.assert_allclose(np.asarray(out), 1.5, rtol=1e-6)


def test_the_pool_is_neither_copied_nor_moved():
    """Called inside a scan that carries the pool: the step's temporaries stay far below the pool."""
    cache = KVCache(*(jnp.zeros((LAYERS, 4_000, 2, 4, H)) for _ in range(2)))
    group = TileGroup(jnp.ones((4, J), jnp.int32), jnp.full((4, 1), 9, jnp.int32))
    qkv = jnp.ones((4, 4, H)), jnp.ones((4, 2, H)), jnp.ones((4, 2, H))

    def layers(q, k, v, cache):
        attend = paged_attention(PagedView((group,)), cpu_attention.decode_attention)
        return jax.lax.scan(lambda c, i: (attend(q, k, v, c, i)[1], None), cache, jnp.arange(LAYERS))[0]

    memory = jax.jit(layers, donate_argnums=3).lower(*qkv, cache).compile().memory_analysis()
    pool_bytes = cache.k_LPKGH.nbytes + cache.v_LPKGH.nbytes
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 100
