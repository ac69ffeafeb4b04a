"""Products with packed weights equal XLA's, over row counts, ragged panels, layers and types; and rows of a table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import cpu_product, packed
from model.packed import can_pack, pack, packed_product, packed_rows
from model.quantization import WeightFormat
from model.quantized import quantize, quantized_product, quantized_rows
from model.seams import rows_at_once

pytestmark = pytest.mark.slow
FLOATS = ("float32", "bfloat16")
TIED = (70, 40)
STACKED = [((3, 40, 3, 5, 8), (1,)), ((3, 4, 8, 70), (1, 2)), ((3, 40, 64), (1,))]


@pytest.fixture(scope="module", autouse=True)
def registered():
    for dtype in packed.DTYPES:
        packed.register(dtype)


def random(shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@jax.jit
def of_layer(x, weight, layer):
    return packed_product(x, weight.of_layer(layer))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "inputs"), STACKED)
def test_products_equal_xlas(shape, inputs, dtype):
    weight, layer = random(shape, dtype), 2
    summed = [axis - 1 for axis in inputs]
    ours = pack(weight, inputs, stacked=True)
    for rows in (1, 2, 3, 6, 7, 13, 64):  # each count of rows in a tile, and more than one tile
        x = random((rows, *(shape[axis] for axis in inputs)), seed=rows)
        expected = jnp.tensordot(x, weight[layer].astype(jnp.float32), (tuple(range(1, x.ndim)), summed))
        np.testing.assert_allclose(of_layer(x, ours, jnp.int32(layer)), expected, atol=2e-5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_is_the_same_alone_as_in_a_batch(dtype):
    weight, x_RD = pack(random((3, 40, 70), dtype), (1,), stacked=True), random((31, 40), seed=1)
    together = of_layer(x_RD, weight, jnp.int32(1))
    for row in range(31):
        np.testing.assert_array_equal(of_layer(x_RD[row : row + 1], weight, jnp.int32(1))[0], together[row])


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_tied_table_gives_its_rows_and_its_product(dtype):
    table_VD, x_RD = random(TIED, dtype), random((5, 40), seed=1)
    ours = pack(table_VD, (1,), stacked=False)
    tokens = jnp.asarray([0, 31, 32, 69])
    np.testing.assert_array_equal(packed_rows(ours, tokens), table_VD[tokens].astype(jnp.float32))
    expected = x_RD @ table_VD.astype(jnp.float32).T
    np.testing.assert_allclose(packed_product(x_RD, ours), expected, atol=2e-5)


@pytest.mark.parametrize(("shape", "inputs"), STACKED)
def test_products_with_int8_equal_xlas(shape, inputs):
    weight = quantize(random(shape), inputs, WeightFormat(), "float32")
    ours = pack(weight.qvalue, inputs, stacked=True, scale=weight.scale)
    x, layer = random((7, *(shape[axis] for axis in inputs)), seed=1), 1
    meant = (weight.qvalue * weight.scale)[layer]
    expected = jnp.tensordot(x, meant, (tuple(range(1, x.ndim)), [axis - 1 for axis in inputs]))
    np.testing.assert_allclose(of_layer(x, ours, jnp.int32(layer)), expected, atol=2e-5)


def test_a_tied_table_of_int8_gives_its_rows_and_its_product():
    table, x_RD = quantize(random(TIED), (1,), WeightFormat(), "float32"), random((5, 40), seed=1)
    ours = pack(table.qvalue, (1,), stacked=False, scale=table.scale)
    tokens = jnp.asarray([0, 31, 32, 69])
    np.testing.assert_array_equal(packed_rows(ours, tokens), quantized_rows(table, tokens, rows_at_once))
    np.testing.assert_allclose(packed_product(x_RD, ours), quantized_product("RD,VD->RV", x_RD, table), atol=2e-5)


def test_large_products_are_shared_among_threads():
    """Large enough for helpers to be woken, many times over: no item is lost, done twice, or read after its end."""
    weight_DF, x_RD = random((512, 2048)), random((40, 512), seed=1)
    ours, expected = pack(weight_DF, (0,), stacked=False), x_RD @ weight_DF
    product = jax.jit(packed_product)
    for _ in range(50):
        np.testing.assert_allclose(product(x_RD, ours), expected, atol=1e-3)


def test_neither_weights_nor_layers_are_copied():
    weight = pack(random((8, 256, 512)), (1,), stacked=True)

    def layers(x, weight):
        return jax.lax.scan(lambda x, i: (x + packed_product(x, weight.of_layer(i))[:, :256], None), x, jnp.arange(8))

    memory = jax.jit(layers).lower(jnp.ones((4, 256)), weight).compile().memory_analysis()
    assert memory.temp_size_in_bytes < weight.panels.nbytes / 100


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_table_is_not_copied_to_read_a_row(dtype):
    """Nor widened, as XLA would do with bfloat16."""
    table = pack(random((4_096, 64), dtype), (1,), stacked=False)
    memory = jax.jit(packed_rows).lower(table, jnp.arange(2)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < table.panels.nbytes / 100


def test_what_cannot_be_packed():
    assert not can_pack(random((40,)), ()), "a norm has no product"
    assert not can_pack(random((5, 40), "bfloat16"), (0,)), "an odd number of bfloat16 inputs"
    assert not can_pack(random((4, 40)).astype(jnp.uint8), (0,)), "two int4 in a byte"
    assert can_pack(random((4, 40), "bfloat16"), (0,))


def test_both_modules_mean_the_same_panels():
    assert packed.WIDTH == cpu_product.WIDTH
