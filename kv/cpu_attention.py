"""Decode attention for CPUs: reads each page where it lies, instead of gathering pages into a new array first.

Decode attention is bound by memory: a gather reads and writes every live key and value before the product reads
them. The kernel in `kv.cpu_kernel`, compiled by Numba and called through XLA's foreign function interface, touches them
once, and stores the new key and value on its way. It serves one query token per sequence; prefill keeps the XLA form,
which is bound by arithmetic.
"""

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kv.cache import ColumnCache
from model import packed
from model.attention import UNBOUNDED, Window

DTYPES = ("float32", "bfloat16")
"""Types of pools that the kernel reads."""


@cache  # compiled code lives as long as its object
def register(dtype: str) -> object:
    """Make the kernel for pools of this type, one of `DTYPES`, known to XLA in this process."""
    from model.cpu_cache import kept_kernels  # Numba takes a second to import

    package = Path(__file__).parent
    with (
        kept_kernels(packed.PACKAGE, packed.SOURCES),  # what is compiled here adds to what is kept there
        kept_kernels(package, (*packed.SOURCES, *package.glob("cpu_*.py"))),
    ):
        from kv import cpu_handlers
        from model import cpu_calls

        return cpu_calls.register(f"podstream_decode_{dtype}", *cpu_handlers.ENTRIES[dtype])


def decode_attention(
    q_SNH: jax.Array,
    k_SKH: jax.Array,
    v_SKH: jax.Array,
    cache: ColumnCache,
    layer: jax.Array,
    pages_SJ: jax.Array,
    positions_S: jax.Array,
    window: Window = None,
    softcap: float | None = None,
) -> tuple[jax.Array, ColumnCache]:
    """Stores each sequence's newest token at its position and attends to all its pages, or to those that reach into its
    window: float32[S, N, H], the cache.

    Position -1 stores nothing and gives zeros. What is not finite is stored as 0 and gives NaN for the query heads that
    share that KV head. Call `register` first.
    """
    shapes = (
        jax.ShapeDtypeStruct(q_SNH.shape, jnp.float32),
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (cache.k_LPKHG, cache.v_LPKGH)),
    )
    call = jax.ffi.ffi_call(f"podstream_decode_{cache.dtype}", shapes, input_output_aliases={3: 1, 4: 2})
    out_SNH, k_LPKHG, v_LPKGH = call(
        q_SNH, k_SKH, v_SKH, cache.k_LPKHG, cache.v_LPKGH, pages_SJ, positions_S, _settings(layer, window, softcap)
    )
    return out_SNH, ColumnCache(k_LPKHG, v_LPKGH)


def _settings(layer: jax.Array, window: Window, softcap: float | None) -> jax.Array:
    """int32: the layer; and for a family that has them, the window and the bits of the soft cap, 0 for none."""
    if window is None and softcap is None:
        return layer[None]
    cap_bits = np.float32(softcap or 0).view(np.int32)
    return jnp.stack([layer, jnp.int32(UNBOUNDED if window is None else window), jnp.int32(cap_bits)])
