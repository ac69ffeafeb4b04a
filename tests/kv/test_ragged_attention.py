"""What jax's kernel is told of a step: its own reference, which is told the same, equals the XLA form.

The kernel itself runs on TPUs only, and is compiled for them in test_tpu_compile.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from kv import ragged_attention
from kv.paged_attention import PagedView, TileGroup, paged_attention
from kv.ragged_attention import RaggedCache, describe
from tests.pages import H, Q, random_caches

pytestmark = pytest.mark.slow


def reference(*arrays, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes, **rest):
    return ref_ragged_paged_attention(*arrays, **rest)


def test_equals_the_xla_form(monkeypatch):
    """Two decode rows, one idle, and a tile that ends early and crosses a page border. Few: jax's is not jitted."""
    monkeypatch.setattr(ragged_attention, "ragged_paged_attention", reference)
    rng, window, softcap, layer = np.random.default_rng(1), 7, 1.5, jnp.int32(1)
    rows, tile = [[-1], [13]], [[*range(12, 18), -1, -1]]
    pages = jnp.asarray([[1, 2, 3], [4, 5, 6], [7, 8, 9]], jnp.int32)
    groups = TileGroup(pages[:2], jnp.asarray(rows)), TileGroup(pages[2:], jnp.asarray(tile))
    _, columns = random_caches(rng, "float32", 10, 2, Q)
    both = jnp.stack([columns.k_LPKHG.swapaxes(3, 4), columns.v_LPKGH], axis=3)  # L, P, K, 2, G, H
    cache = RaggedCache(both.transpose(0, 1, 4, 2, 3, 5).reshape(2, 10, Q, 4, H))
    q, k, v = (jnp.asarray(rng.standard_normal((2 + Q, n, H)), jnp.float32) for n in (4, 2, 2))
    plan = groups, describe(groups)
    out, pools = ragged_attention.attend_locally(
        q / H**0.5, cache.encode(k, v), cache.pools, layer, window, softcap, plan
    )
    attend = jax.jit(lambda *arrays: paged_attention(PagedView(groups))(*arrays, window=window, softcap=softcap))
    expected, stored = attend(q, k, v, columns, layer)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_array_equal(pools[0][:, 1:, :, 1::2], stored.v_LPKGH.swapaxes(2, 3)[:, 1:])
