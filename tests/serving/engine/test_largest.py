"""The largest logits are the same ones in the same order, whether the vocabulary lies on one device or on several."""

import jax
import numpy as np
import pytest

from serving.engine.largest import largest


@pytest.mark.parametrize("num", [1, 5, 40, 96])
def test_parts_of_the_vocabulary_together_say_what_the_whole_says(num):
    """With many ties, which go to the lower token id."""
    logits_RV = np.random.default_rng(num).integers(-6, 6, (3, 96)).astype(np.float32)
    expected = jax.lax.top_k(logits_RV, num)
    for shards in (1, 2, 8):
        for found, wanted in zip(largest(logits_RV, num, shards), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
