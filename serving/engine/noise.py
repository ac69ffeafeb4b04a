"""Noise that is a function of (seed, position) alone, so that an answer does not depend on its batch."""

import jax
import jax.numpy as jnp

_GOLDEN = 0x9E3779B9


def gumbel(seed_R2: jax.Array, position_R: jax.Array, count: int) -> jax.Array:
    """float32[R, count], independent draws from the standard Gumbel distribution.

    A counter is hashed with the seed and the position by rounds of MurmurHash3's finalizer (Appleby 2011), in which
    every input bit flips every output bit half of the time. It is not for secrets, and a tenth of Threefry's code.
    """
    high_R, low_R = seed_R2[:, 0], seed_R2[:, 1]
    key_R = _mix(_mix(_mix(high_R + jnp.uint32(_GOLDEN)) ^ low_R) ^ position_R.astype(jnp.uint32))
    counter_C = jnp.arange(count, dtype=jnp.uint32) * jnp.uint32(_GOLDEN)
    bits_RC = _mix(_mix(key_R[:, None] + counter_C) ^ key_R[:, None])
    uniform_RC = ((bits_RC >> 9).astype(jnp.float32) + 0.5) * 2.0**-23  # never 0, never 1
    return -jnp.log(-jnp.log(uniform_RC))


def _mix(h: jax.Array) -> jax.Array:
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
