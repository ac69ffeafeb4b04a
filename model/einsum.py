"""Products of activations with weights of one type, accumulated in float32."""

from functools import partial

import jax
import jax.numpy as jnp

MANY_ROWS = 512
"""From so many up inputs are written down before the product, always if it is exact. Else each of its tiles would make
them anew, in code that a TPU's compiler takes twice as long for; fewer rows, in every layer, may not cost the bytes."""


def einsum(spec: str, x: jax.Array, w: jax.Array, *, is_exact: bool = False) -> jax.Array:
    """`jnp.einsum` of two arrays of one type, float32 out.

    Accelerators round sums to the type of the weights, as the next product would, unless `is_exact`: half of the bytes
    lie in memory on their way, and travel where devices that share the inputs add up what each of them found.
    """
    wide = partial(jnp.einsum, spec, preferred_element_type=jnp.float32)
    if w.dtype == jnp.float32:
        return wide(x, w)

    def narrow(x: jax.Array, w: jax.Array) -> jax.Array:
        if is_exact or x.shape[0] >= MANY_ROWS:
            x = jax.lax.optimization_barrier(x)
        if is_exact:
            return wide(x, w)
        # or XLA would widen first and add up then
        return jax.lax.optimization_barrier(jnp.einsum(spec, x, w)).astype(jnp.float32)

    return jax.lax.platform_dependent(x, w, cpu=wide, default=narrow)
