"""The largest logits are the same ones in the same order, whether the vocabulary lies on one device or on several."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from serving.engine.largest import first_largest, largest


@pytest.mark.parametrize("num", [1, 5, 40, 96])
def test_parts_of_the_vocabulary_together_say_what_the_whole_says(num):
    """With many ties, which go to the lower token id."""
    logits_RV = np.random.default_rng(num).integers(-6, 6, (3, 96)).astype(np.float32)
    expected = jax.lax.top_k(logits_RV, num)
    for shards in (1, 2, 8):
        for found, wanted in zip(largest(logits_RV, num, shards), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


@given(logits_RV=arrays(np.float32, (2, 7), elements=st.sampled_from([-np.inf, -1.0, 0.0, 2.0])))
@settings(deadline=None)
def test_first_largest_is_an_argmax(logits_RV):
    np.testing.assert_array_equal(first_largest(logits_RV), np.argmax(logits_RV, axis=1))


def test_first_largest_of_what_is_no_number_is_a_token_nevertheless():
    assert 0 <= int(first_largest(np.full((1, 5), np.nan, np.float32))[0]) < 5
