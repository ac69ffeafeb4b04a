"""Random pages and ragged steps over them, for kernels that must equal the XLA form of paged attention."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from kv.cache import ColumnCache
from kv.layer_sets import LayerSets
from kv.paged_attention import PagedView, TileGroup
from kv.row_cache import RowCache
from kv.split_attention import Split
from model.bits import as_bits, as_numbers

LAYERS, H, Q = 2, 16, 8
ONE_BYTE = ("int8", "float8_e4m3fn")


def one_device(cores=1):
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    return Split(mesh, None, None, cores)


def random_caches(rng, dtype, num_pages, kv_heads, page_size, row=H):
    """The same pages as the kernel has them and as the reference has them."""
    shape = (LAYERS, num_pages, kv_heads, page_size, H)
    k, v = (jnp.asarray(rng.integers(-127, 127, shape) if dtype == "int8" else rng.standard_normal(shape), dtype)
            for _ in "kv")  # fmt: skip
    scales = [None, None]
    if dtype == "int8":
        scales = [jnp.asarray(rng.uniform(0.005, 0.02, shape[:-1]), jnp.bfloat16) for _ in "kv"]
    held = lambda scale: None if scale is None else as_bits(scale)  # noqa: E731
    widened = "float32" if dtype in ONE_BYTE else None
    wide_k, wide_v = (jnp.pad(x, ((0, 0),) * 4 + ((0, row - H),)) for x in (k, v))
    both = None if dtype != "int8" else jnp.stack(scales, axis=3).reshape(LAYERS, num_pages, -1, page_size)
    return RowCache(wide_k, wide_v, both, widened), ColumnCache(
        as_bits(k.swapaxes(3, 4)), as_bits(v), *map(held, scales), widened
    )


def random_step(rng, page_size, pages_per_slot):
    """Decode rows and tiles of prefill chunks: page borders, a first token, a full context, and some with nothing."""
    full = page_size * pages_per_slot
    rows = np.array([-1, 0, page_size - 1, page_size, full - 1, rng.integers(0, full)])
    somewhere = int(rng.integers(0, full - 2 * Q)), int(rng.integers(Q + 1, 2 * Q))
    chunks = [(page_size - 3, Q + 5), somewhere, (full - 3, 3), (0, 1)]
    num_sequences = len(rows) + len(chunks)
    pages = 1 + rng.permutation(num_sequences * pages_per_slot).reshape(num_sequences, pages_per_slot)
    tiles, tile_pages = [np.full(Q, -1)], [pages[0]]
    for number, (start, length) in enumerate(chunks):
        for at in range(start, start + length, Q):
            positions = np.arange(at, at + Q)
            tiles.append(np.where(positions < start + length, positions, -1))
            tile_pages.append(pages[len(rows) + number])
    tiles.append(np.full(Q, -1))
    tile_pages.append(pages[0])
    groups = TileGroup(pages[: len(rows)], rows[:, None]), TileGroup(np.stack(tile_pages), np.stack(tiles))
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), groups), num_sequences * pages_per_slot + 1


def in_sets(groups):
    """The same groups for layers that do not have their pages in common: of layer 3 at place 1 of the arrays."""
    sets = LayerSets(2, (None, 8), (0, 1, 0, 1), (0, 0, 1, 1))
    others = (group.pages_SJ[:, ::-1] for group in groups)
    rows = (jnp.stack([other, group.pages_SJ]) for other, group in zip(others, groups, strict=True))
    return PagedView(tuple(TileGroup(r, group.positions_SQ) for r, group in zip(rows, groups, strict=True)), sets)


def assert_same_pages(rows, columns):
    """What lies in a RowCache lies in a ColumnCache. Of the null page nobody cares."""
    pairs = [
        (rows.k_LPKGH[..., :H], columns.k_LPKHG.swapaxes(3, 4)),
        (rows.v_LPKGH[..., :H], columns.v_LPKGH),
    ]
    if rows.scale_LPKG is not None:
        pairs += [
            (rows.scale_LPKG[:, :, ::2], columns.k_scale_LPKG),
            (rows.scale_LPKG[:, :, 1::2], columns.v_scale_LPKG),
        ]
    for ours, theirs in pairs:
        np.testing.assert_array_equal(ours[:, 1:], as_numbers(theirs)[:, 1:])
