"""Token masks on the device: rows whose answer follows a grammar may only choose what it allows.

A step's masks are bits, lowest first, 32 tokens in a word: a sixteenth of the logits' bytes in bfloat16. They are
uploaded only when some row has a grammar; otherwise the program gets a constant that lies on the device already.
"""

import jax
import jax.numpy as jnp

WORD = 32
ALL_TOKENS = -1
"""A word whose tokens are all allowed."""


def num_words(vocab_size: int) -> int:
    """int32 words of one row's mask."""
    return -(-vocab_size // WORD)


def keep_allowed(logits_RV: jax.Array, masked_R: jax.Array, masks_RW: jax.Array) -> jax.Array:
    """float32[R, V]: -inf where `masks_RW` has a 0, in rows with `masked_R`; other rows stay as they are."""
    R, V = logits_RV.shape
    bits_RV = (masks_RW[:, :, None] >> jnp.arange(WORD) & 1).reshape(R, -1)[:, :V]
    return jnp.where((bits_RV == 1) | ~masked_R[:, None], logits_RV, -jnp.inf)
