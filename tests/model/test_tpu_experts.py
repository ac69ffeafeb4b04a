"""The TPU's product with experts, interpreted here, against one matrix after another."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from model.stacked import Stacked
from model.tpu_experts import expert_product

LAYERS, EXPERTS, PAIR, INPUTS, OUTPUTS = 2, 5, 2, 16, 256
RANDOM = np.random.default_rng(4)
MATRICES = RANDOM.standard_normal((LAYERS, EXPERTS, PAIR, INPUTS, OUTPUTS)).astype(np.float32)
INTERPRET = pltpu.InterpretParams()


def expected(x_MI, counts_Z, layer, matrices=MATRICES):
    expert_M = np.repeat(np.arange(EXPERTS), counts_Z)
    return np.einsum("MI,MCIO->MCO", x_MI, matrices[layer][expert_M])


def product(x_MI, counts_Z, layer, matrices=MATRICES, scale=None):
    scale = None if scale is None else jnp.asarray(scale)
    whole = Stacked(jnp.asarray(np.swapaxes(matrices, 3, 4)), scale, is_interpreted=True).of_layer(jnp.int32(layer))
    return whole(jnp.asarray(x_MI), jnp.asarray(counts_Z, jnp.int32))


@settings(max_examples=4, deadline=None)
@given(counts_Z=st.lists(st.integers(0, 12), min_size=EXPERTS, max_size=EXPERTS).filter(sum), layer=st.integers(0, 1))
def test_each_row_meets_its_own_expert(counts_Z, layer):
    x_MI = RANDOM.standard_normal((sum(counts_Z), INPUTS)).astype(np.float32)
    np.testing.assert_allclose(product(x_MI, counts_Z, layer), expected(x_MI, counts_Z, layer), atol=1e-5)


def test_one_matrix_has_its_inputs_first():
    x_MI, counts_Z = RANDOM.standard_normal((7, INPUTS)).astype(np.float32), jnp.asarray([3, 0, 0, 4, 0])
    one = jnp.asarray(MATRICES[:, :, :1])
    got = expert_product(jnp.asarray(x_MI), one, None, jnp.ones(1, jnp.int32), counts_Z, 0, interpret=INTERPRET)
    np.testing.assert_allclose(got, expected(x_MI, counts_Z, 1)[:, 0], atol=1e-5)


@pytest.mark.parametrize("counts_Z", [[0, 0, 3, 0, 0], [40, 0, 1, 0, 0]])
def test_int8_is_widened_in_the_kernel(counts_Z):
    numbers = RANDOM.integers(-127, 128, MATRICES.shape, np.int8)
    scale = RANDOM.uniform(0.01, 0.02, (LAYERS, EXPERTS, PAIR, 1, OUTPUTS)).astype(np.float32)
    x_MI = np.round(RANDOM.standard_normal((sum(counts_Z), INPUTS)) * 4).astype(np.float32)  # exact in bfloat16
    got = product(x_MI, counts_Z, 1, numbers, scale)
    np.testing.assert_allclose(got, expected(x_MI, counts_Z, 1, numbers * scale), rtol=1e-4, atol=1e-4)
