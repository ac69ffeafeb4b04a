"""Decode attention for CPUs: reads each page where it lies, instead of gathering pages into a new array first.

Decode attention is bound by memory: a gather reads and writes every live key and value before the product reads
them. The kernel in `kv.cpu_kernel`, compiled by Numba and called through XLA's foreign function interface, touches them
once. It serves one query token per sequence; prefill keeps the XLA form, which is bound by arithmetic.
"""

import ctypes

import jax
import jax.numpy as jnp

from kv.cache import KVCache
from kv.cpu_kernel import bfloat16_handler, float32_handler


def register() -> None:
    """Make the kernel known to XLA in this process; once is enough, more does no harm."""
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    for name, handler in (("float32", float32_handler), ("bfloat16", bfloat16_handler)):
        jax.ffi.register_ffi_target(f"podstream_decode_{name}", capsule(handler.address, None, None), platform="cpu")


def decode_attention(
    q_SNH: jax.Array, cache: KVCache, layer: jax.Array, pages_SJ: jax.Array, positions_S: jax.Array
) -> jax.Array:
    """float32[S, N, H]: each sequence's newest token attends to all its pages. Position -1 gives zeros.

    Call `register` first.
    """
    call = jax.ffi.ffi_call(f"podstream_decode_{cache.k_LPKGH.dtype}", jax.ShapeDtypeStruct(q_SNH.shape, jnp.float32))
    return call(q_SNH, cache.k_LPKGH, cache.v_LPKGH, pages_SJ, positions_S, layer[None])
