"""Paged attention equals dense attention, whatever pages, tiles and lengths it is given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.cache import ColumnCache, abstract_cache, encode, make_cache
from kv.paged_attention import PagedView, TileGroup, paged_attention
from model.attention import dense_attention
from model.bits import as_bits
from model.config import ModelConfig
from sharding.mesh import make_mesh
from sharding.rules import choose_rules
from sharding.spec import MeshSpec

N, K, H, G, J, PAGES = 4, 2, 8, 4, 50, 256
ATOL = 2e-6


def empty_cache(layers=2):
    return ColumnCache(jnp.zeros((layers, PAGES, K, H, G)), jnp.zeros((layers, PAGES, K, G, H)))


def paged(groups, q, k, v, cache, layer, window=None, softcap=None):
    return paged_attention(PagedView(groups))(q, k, v, cache, layer, window=window, softcap=softcap)


attend = jax.jit(paged, static_argnames="softcap")
encode_int8 = jax.jit(lambda x: encode(x, jnp.dtype("int8")))


def random_qkv(rng, tokens):
    return [jnp.asarray(rng.standard_normal((tokens, heads, H)), jnp.float32) for heads in (N, K, K)]


def page_rows(rng, num_rows):
    return rng.permutation(np.arange(1, PAGES))[: num_rows * J].reshape(num_rows, J).astype(np.int32)


def tiles(pages_J, start, length, size, width=J, count=None):
    """Tiles of `size` for tokens start..start+length of one sequence; `count` of them, so that a test compiles once."""
    count = count or -(-length // size)
    positions = np.full(count * size, -1, np.int32)
    positions[:length] = np.arange(start, start + length)
    return TileGroup(jnp.tile(pages_J[None, :width], (count, 1)), jnp.asarray(positions.reshape(count, size)))


@pytest.mark.parametrize(("length", "size"), [(1, 1), (4, 8), (5, 1), (127, 8), (128, 1), (129, 8), (200, 8)])
def test_a_whole_prompt_equals_dense_attention(length, size):
    rng = np.random.default_rng(length)
    total = 200
    group = tiles(page_rows(rng, 1)[0], 0, length, size, count=total // size)
    q, k, v = random_qkv(rng, total)
    out, _ = attend((group,), q, k, v, empty_cache(), jnp.int32(1))
    expected, _ = dense_attention(jnp.zeros(total, int), jnp.arange(total))(q, k, v, None, jnp.int32(1))
    np.testing.assert_allclose(out[:length], expected[:length], atol=ATOL)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "softcap"), [(1, None), (130, None), (None, 0.5), (40, 0.5)])
def test_windows_and_soft_caps_equal_dense_attention_and_pages_before_a_window_are_not_needed(window, softcap):
    """The prompt in one step, then its last token again as a decode row, with null pages before its window."""
    rng, total = np.random.default_rng(5), 200
    pages = page_rows(rng, 1)[0]
    q, k, v = random_qkv(rng, total)
    rest = {"window": None if window is None else jnp.int32(window), "softcap": softcap}
    out, cache = attend((tiles(pages, 0, total, 8),), q, k, v, empty_cache(), jnp.int32(1), **rest)
    expected, _ = dense_attention(jnp.zeros(total, int), jnp.arange(total))(q, k, v, None, jnp.int32(1), **rest)
    np.testing.assert_allclose(out, expected, atol=ATOL)
    left = pages.copy()
    left[: max(total - (window or total), 0) // G] = 0
    last = (x[-1:] for x in (q, k, v))
    out, _ = attend((tiles(left, total - 1, 1, 1),), *last, cache, jnp.int32(1), **rest)
    np.testing.assert_allclose(out, expected[-1:], atol=ATOL)


@pytest.mark.parametrize("size", [1, 8])
def test_what_is_not_finite_spoils_its_own_token_and_is_not_stored(size):
    rng = np.random.default_rng(size)
    group = tiles(page_rows(rng, 1)[0], 0, 24, size)
    q, k, v = random_qkv(rng, 24)
    expected, _ = attend(
        (group,), q, k.at[9, 1].set(0).at[3, 0, 2].set(0), v.at[17, 1, 5].set(0), empty_cache(), jnp.int32(1)
    )
    damaged = k.at[9, 1].set(jnp.nan).at[3, 0, 2].set(jnp.inf), v.at[17, 1, 5].set(-jnp.inf)
    out, cache = attend((group,), q, *damaged, empty_cache(), jnp.int32(1))
    is_spoilt = np.zeros((24, N), bool)
    is_spoilt[9, 2:] = is_spoilt[3, :2] = is_spoilt[17, 2:] = True  # the query heads of that KV head
    np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(is_spoilt[..., None], out.shape))
    np.testing.assert_array_equal(out[~is_spoilt], expected[~is_spoilt])
    assert np.isfinite(cache.k_LPKHG).all() and np.isfinite(cache.v_LPKGH).all()


@pytest.mark.parametrize("first", [1, 31, 130])
def test_a_chunk_sees_the_chunks_before_it(first):
    rng = np.random.default_rng(first)
    total, pages = 160, page_rows(rng, 1)[0]
    q, k, v = random_qkv(rng, total)
    cache = empty_cache()
    outs = []
    for start, end in ((0, first), (first, total)):
        group = tiles(pages, start, end - start, 1, count=total)
        padded = (jnp.pad(x[start:end], ((0, total - (end - start)), (0, 0), (0, 0))) for x in (q, k, v))
        out, cache = attend((group,), *padded, cache, jnp.int32(0))
        outs.append(out[: end - start])
    expected, _ = dense_attention(jnp.zeros(total, int), jnp.arange(total))(q, k, v, None, jnp.int32(0))
    np.testing.assert_allclose(jnp.concatenate(outs), expected, atol=ATOL)


def test_sequences_of_one_step_do_not_see_each_other():
    rng = np.random.default_rng(7)
    lengths, rows = (9, 1, 30), page_rows(rng, 3)
    groups = tuple(tiles(rows[i], 0, n, 1) for i, n in enumerate(lengths))
    q, k, v = random_qkv(rng, sum(lengths))
    out, _ = attend(groups, q, k, v, empty_cache(), jnp.int32(0))
    segments = jnp.repeat(jnp.arange(3), jnp.asarray(lengths))
    positions = jnp.concatenate([jnp.arange(n) for n in lengths])
    expected, _ = dense_attention(segments, positions)(q, k, v, None, jnp.int32(0))
    np.testing.assert_allclose(out, expected, atol=ATOL)


def test_padding_writes_only_to_the_null_page_and_other_layers_are_left_alone():
    rng = np.random.default_rng(0)
    pages = page_rows(rng, 1)[0]
    group = tiles(pages, 0, 3, 8)
    q, k, v = random_qkv(rng, 8)
    out, cache = attend((group,), q, k, v, empty_cache(), jnp.int32(1))
    written = {int(p) for p in np.argwhere(np.any(np.asarray(cache.k_LPKHG[1]), axis=(1, 2, 3)))[:, 0]}
    assert written <= {0, int(pages[0])}
    assert not np.any(np.asarray(cache.k_LPKHG[0])) and not np.any(np.asarray(cache.v_LPKGH[0]))
    assert np.all(np.isfinite(out)) and not np.any(np.asarray(out[3:]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8"])
def test_the_cache_is_updated_in_place_when_donated(dtype):
    """No copy of it, and none in another type, which XLA for CPUs would make of short floats."""
    group = tiles(np.arange(1, J + 1, dtype=np.int32), 0, 8, 8)
    config = ModelConfig.tiny(num_kv_heads=K, head_dim=H)
    mesh = make_mesh(MeshSpec())
    cache = make_cache(abstract_cache(config, 50 * PAGES, G, dtype, mesh, choose_rules(config, MeshSpec())))
    q, k, v = random_qkv(np.random.default_rng(1), 8)
    memory = jax.jit(paged, donate_argnums=4).lower((group,), q, k, v, cache, jnp.int32(1)).compile().memory_analysis()
    pool_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_pages_of_one_byte_equal_dense_attention_over_what_they_mean(dtype):
    rng = np.random.default_rng(3)
    q, k, v = random_qkv(rng, 40)
    sizes_K1 = jnp.asarray([1e-3, 200])[:, None]  # values of one head are small, some of the other exceed fp8
    v = v * sizes_K1
    shapes = (2, PAGES, K, H, G), (2, PAGES, K, G, H)
    scales = [jnp.zeros((2, PAGES, K, G), jnp.uint16)] * 2 if dtype == "int8" else [None, None]
    cache = ColumnCache(*(as_bits(jnp.zeros(shape, dtype)) for shape in shapes), *scales, widened="float32")
    pages, outs = page_rows(rng, 1)[0], []
    for start, end, size in ((0, 33, 8), (33, 40, 1)):
        group = tiles(pages, start, end - start, size)
        padded = [
            jnp.pad(x[start:end], ((0, group.positions_SQ.size - (end - start)), (0, 0), (0, 0))) for x in (q, k, v)
        ]
        out, cache = attend((group,), *padded, cache, jnp.int32(1))
        outs.append(out[: end - start])
    meant = []
    for x in (k, v):
        numbers, scale = encode(x, jnp.dtype(dtype))
        meant.append(numbers.astype(jnp.float32) * (1 if scale is None else scale.astype(jnp.float32)[..., None]))
    expected, _ = dense_attention(jnp.zeros(40, int), jnp.arange(40))(q, *meant, None, jnp.int32(0))
    sizes_N1 = jnp.repeat(sizes_K1, N // K, axis=0)
    np.testing.assert_allclose(jnp.concatenate(outs) / sizes_N1, expected / sizes_N1, atol=ATOL)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=3, max_size=3))
def test_int8_pages_are_off_by_half_a_scale_at_most(values):
    x = np.asarray(values, np.float32)[None, None, :]
    numbers, scale = encode_int8(x)
    assert np.all(np.isfinite(np.asarray(scale, np.float32))) and np.all(np.asarray(scale, np.float32) > 0)
    meant = np.asarray(numbers, np.float64) * np.asarray(scale, np.float64)[..., None]
    step = float(np.asarray(scale, np.float64)[0, 0]) if np.abs(x).max() > 1e-35 else 1e-35
    assert np.all(np.abs(meant - x) <= 1.01 * step)
    assert np.abs(np.asarray(numbers, int)).max() <= 127


def test_fp8_pages_clip_what_exceeds_their_range():
    numbers, _ = encode(jnp.asarray([[[1e9, -500.0, 448.0, 0.3]]]), jnp.float8_e4m3fn)
    np.testing.assert_array_equal(numbers.astype(jnp.float32), [[[448, -448, 448, 0.3125]]])
