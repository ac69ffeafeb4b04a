"""Short floats as unsigned integers of the same bits, which is how pages and packed weights hold them.

XLA for CPUs has no scatter and no gather of bfloat16 and of fp8: it widens the array first, and narrows it again. Of a
pool that would be all pages, once per layer, where a few tokens were to be stored; of a table of tokens all of it.
"""

import jax
import jax.numpy as jnp

_BITS = {jnp.dtype(jnp.bfloat16): jnp.dtype(jnp.uint16), jnp.dtype(jnp.float8_e4m3fn): jnp.dtype(jnp.uint8)}
_FLOATS = {bits: floats for floats, bits in _BITS.items()}


def held_as(dtype: jnp.dtype) -> jnp.dtype:
    """The type that numbers of this type are held in; their own, if it is none of those."""
    return _BITS.get(jnp.dtype(dtype), jnp.dtype(dtype))


def meant_by(dtype: jnp.dtype) -> jnp.dtype:
    """The type of the numbers that are held in this one."""
    return _FLOATS.get(jnp.dtype(dtype), jnp.dtype(dtype))


def as_bits(x: jax.Array) -> jax.Array:
    """Numbers as they are held."""
    held = held_as(x.dtype)
    return x if held == x.dtype else jax.lax.bitcast_convert_type(x, held)


def as_numbers(x: jax.Array) -> jax.Array:
    """What is held, as numbers."""
    meant = meant_by(x.dtype)
    return x if meant == x.dtype else jax.lax.bitcast_convert_type(x, meant)
