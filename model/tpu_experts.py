"""The TPU's product with experts: a grid over experts, each multiplied with the rows that are sorted to it.

Rows stay in VMEM, matrices come from HBM one after another, each once. An expert without rows is not fetched: its place
in the grid names the matrix that is there already.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

TILE = 16  # rows that are multiplied at once: those of a tile of bfloat16
_BLOCK_BYTES = 4 << 20  # of a matrix, and of results; two of each are in VMEM
_VMEM_BYTES = 96 << 20  # with the rows of a long prefill; a decode step takes a tenth of it


def expert_product(
    x_MI: jax.Array,
    matrices_LZCOI: jax.Array,
    scale_LZC1O: jax.Array | None,
    layer: jax.Array,
    counts_Z: jax.Array,
    which: int,
    interpret: Any = False,
) -> jax.Array:
    """float32[M, O]: each row times the matrix of its expert; rows are sorted by expert, `counts_Z` of each. `layer` is
    int32[1]; for the order of axes see `model.stacked`. Products are in bfloat16, or in float32 with such matrices."""
    M, inputs = x_MI.shape
    Z, num_products, *sides = matrices_LZCOI.shape[1:]
    has_outputs_first = num_products > 1
    outputs = sides[0] if has_outputs_first else sides[1]
    dtype = jnp.float32 if matrices_LZCOI.dtype == jnp.float32 else jnp.bfloat16
    rows = -(-M // TILE) * TILE
    x_MI = jnp.pad(x_MI.astype(dtype), ((0, rows - M), (0, 0)))
    ends_Z = jnp.cumsum(counts_Z)
    numbers_Z = jnp.arange(Z, dtype=jnp.int32)
    present_Z = jax.lax.cummax(jnp.where(counts_Z > 0, numbers_Z, 0))
    block = _block(outputs, inputs * matrices_LZCOI.dtype.itemsize, rows * 4)

    def of_outputs(out: Any, expert: Any, layer: Any, _ends: Any, present: Any) -> tuple[Any, ...]:
        return layer[0], present[expert], which, 0, out

    def outputs_first(*where: Any) -> tuple[Any, ...]:
        *place, _, out = of_outputs(*where)
        return *place, out, 0

    matrix = (
        pl.BlockSpec((1, 1, 1, block, inputs), outputs_first)
        if has_outputs_first
        else pl.BlockSpec((1, 1, 1, inputs, block), of_outputs)
    )
    in_specs = [
        pl.BlockSpec((rows, inputs), lambda out, expert, *_: (0, 0)),
        matrix,
    ]
    arrays = [x_MI, matrices_LZCOI]
    if scale_LZC1O is not None:
        in_specs.append(pl.BlockSpec((1, 1, 1, 1, block), of_outputs))
        arrays.append(scale_LZC1O)
    result = pl.pallas_call(
        partial(_multiply, dtype=dtype, axis=int(has_outputs_first)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(outputs, block), Z),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((rows, block), lambda out, expert, *_: (0, out)),
        ),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
        ),
        interpret=interpret,
        name="experts",
    )(layer, ends_Z, present_Z, *arrays)
    return result[:M]


def _block(outputs: int, matrix_bytes: int, result_bytes: int) -> int:
    """Columns that are computed at once, of so many bytes each: all, or whole lanes."""
    most = _BLOCK_BYTES // max(matrix_bytes, result_bytes) // 128 * 128
    return outputs if outputs <= max(most, 128) else max(most, 128)


def _multiply(
    layer: Any, ends: Any, present: Any, x: Any, matrix: Any, *refs: Any, dtype: jnp.dtype, axis: int
) -> None:
    """`axis` of a matrix is that of its inputs."""
    scale, out = (refs[0], refs[1]) if len(refs) == 2 else (None, refs[0])
    expert = pl.program_id(1)
    end = ends[expert]
    start = jnp.where(expert == 0, 0, ends[jnp.maximum(expert - 1, 0)])

    @pl.when(expert == 0)
    def begin() -> None:
        out[...] = jnp.zeros(out.shape, out.dtype)

    def tile(number: jax.Array, _: None) -> None:
        here = pl.ds(pl.multiple_of(number * TILE, TILE), TILE)
        contracted = (((1,), (axis,)), ((), ()))
        y = jax.lax.dot_general(
            x[here, :], matrix[0, 0, 0].astype(dtype), contracted, preferred_element_type=jnp.float32
        )
        if scale is not None:
            y = y * scale[0, 0, 0].astype(jnp.float32)
        row = number * TILE + jax.lax.broadcasted_iota(jnp.int32, (TILE, 1), 0)
        out[here, :] += jnp.where((row >= start) & (row < end), y, 0.0)

    jax.lax.fori_loop(start // TILE, jnp.where(end > start, (end - 1) // TILE + 1, start // TILE), tile, None)
