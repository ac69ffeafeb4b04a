"""Quantised weights are close to the floats they came from, and products are those with what the numbers mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model.quantization import WeightFormat
from model.quantized import quantize, quantized_product, quantized_rows, stored_shapes
from model.seams import rows_at_once

INT8, INT4 = WeightFormat(), WeightFormat(32)
# Spec of the product, shape of the weight, its input axes.
PRODUCTS = [
    ("TD,DNH->TNH", (64, 3, 4), (0,)),
    ("TNH,NHD->TD", (2, 32, 5), (0, 1)),
    ("TD,DKRH->TKRH", (64, 2, 3, 4), (0,)),
    ("RD,VD->RV", (5, 64), (1,)),
]


make = jax.jit(quantize, static_argnums=(1, 2, 3))


def random(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def meant(array):
    """What the numbers stand for, in float64, written without qwix."""
    numbers, scale = np.asarray(array.qvalue), np.asarray(array.scale, np.float64)
    if numbers.dtype == np.uint8:
        numbers = unpacked(numbers, scale.shape)
    for axis, size in enumerate(numbers.shape):
        scale = np.repeat(scale, size // scale.shape[axis], axis)
    return numbers.astype(np.float64) * scale


def unpacked(packed, scale_shape):
    """int4 numbers by loops: byte i of a group of 2 n holds number i in its low bits, n + i in its high ones."""
    [axis] = [i for i, (size, scales) in enumerate(zip(packed.shape, scale_shape, strict=True)) if size != scales]
    bytes_per_group = packed.shape[axis] // scale_shape[axis]
    rows = []
    for group in np.split(np.moveaxis(packed, axis, 0), scale_shape[axis]):
        for nibbles in (group & 15, group >> 4):
            rows += [np.where(row > 7, row.astype(int) - 16, row.astype(int)) for row in nibbles]
    assert len(rows) == 2 * bytes_per_group * scale_shape[axis]
    return np.moveaxis(np.stack(rows), 0, axis)


@pytest.mark.parametrize("form", [INT8, INT4], ids=["int8", "int4"])
@pytest.mark.parametrize(("spec", "shape", "inputs"), PRODUCTS)
def test_a_product_is_that_with_what_the_numbers_mean(form, spec, shape, inputs):
    array = make(random(shape), inputs, form, "float32")
    assert (array.qvalue.shape, array.scale.shape) == stored_shapes(shape, inputs, form)
    x = random((3, *(shape[axis] for axis in inputs)), seed=1)
    expected = np.einsum(spec, np.asarray(x, np.float64), meant(array))
    product = jax.jit(quantized_product, static_argnums=0)(spec, x, array)
    np.testing.assert_allclose(product, expected, atol=1e-5)
    assert product.dtype == jnp.float32


def test_rows_of_a_table():
    table = make(random((7, 64)), (1,), INT8, "float32")
    np.testing.assert_allclose(
        quantized_rows(table, jnp.asarray([3, 0, 3]), rows_at_once), meant(table)[[3, 0, 3]], rtol=1e-6
    )


@settings(max_examples=25, deadline=None)
@given(
    form=st.sampled_from([INT8, INT4]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    size=st.sampled_from([1e-20, 1e-3, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
@example(form=INT4, dtype="bfloat16", size=1e-3, seed=94)  # its scale would be rounded down
def test_no_weight_is_off_by_more_than_its_scale(form, dtype, size, seed):
    """Half a scale by rounding; in int4 a whole one where a group has its extreme on both sides."""
    weight = random((64, 3), seed) * np.float32(size)
    weight[:, 1] = 0
    array = make(jnp.asarray(weight), (0,), form, dtype)
    steps = np.repeat(np.abs(np.asarray(array.scale, np.float64)), 64 // array.scale.shape[0], 0)
    bound = 0.505 if form is INT8 and dtype == "float32" else 1.0
    assert np.all(np.abs(meant(array) - weight) <= bound * steps + 1e-30)
    assert not meant(array)[:, 1].any(), "zeros stay zeros"


def test_int4_uses_all_of_its_numbers():
    weight = jnp.linspace(-1.0, 0.875, 32)[:, None]
    array = make(weight, (0,), INT4, "float32")
    numbers = unpacked(np.asarray(array.qvalue), array.scale.shape)
    np.testing.assert_array_equal(np.unique(numbers), range(-8, 8))


def test_the_scales_say_what_products_compute_in():
    array = make(random((64, 3)), (0,), INT8, "bfloat16")
    assert array.scale.dtype == array.dtype == jnp.bfloat16
    text = str(jax.make_jaxpr(lambda x: quantized_product("TD,DF->TF", x, array))(random((2, 64))))
    assert "bf16[2,64]" in text and "preferred_element_type=float32" in text
