"""The CPU's product of activations with packed weights.

A product of few rows is bound by memory: XLA rearranges the weights in every call before it multiplies, which costs
more than the product. Here they lie as the loop reads them, once for all: panels of `WIDTH` outputs, each one stream.
Threads take panels from a common counter. Every output is summed over the inputs in their order, whatever the rows
beside it: a row's result is the same alone as in a batch, bit by bit.

No annotations: Numba compiles a function from the types that it is called with.
"""

from itertools import chain
from typing import NamedTuple

import numpy as np
from llvmlite import binding, ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from model.cpu_calls import HEADER_WORDS, NUM_ITEMS, item_done, next_item, words
from model.cpu_simd import as_pointer, generate_prefetch, num_bytes

WIDTH = 32
"""Outputs of a panel."""
X, PANELS, OUT, ROWS, INPUTS, OUTPUTS = range(HEADER_WORDS, HEADER_WORDS + 6)
JOB_WORDS = OUTPUTS + 1

# A tile of rows x columns is summed in registers: of 32 of 16 floats, or of 16 of 8 floats.
_LANES, _TILE_ROWS, _SUMS = (16, 12, 24) if binding.get_host_cpu_features().get("avx512f") else (8, 6, 12)
_BLOCK = 192  # inputs at most, whose weights stay in the first cache
_CACHE_LINE = 64
_FLOAT, _BYTE, _INT, _WORD = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_FLOAT, _LANES), ir.VectorType(_INT, _LANES)


class _Fetch(NamedTuple):
    """What a loop fetches meanwhile: `step` bytes from `start` on for each input, in so many cache lines a turn."""

    start: ir.Value
    step: ir.Value
    lines: int


@intrinsic
def _add_tile(typing_context, rows, x, panel, out, depth, inputs, outputs, ahead, ahead_step, element):
    """out[:rows, :WIDTH] += x[:rows, :depth] . panel[:depth], for at most _TILE_ROWS rows.

    Addresses of float32 x[rows, inputs] and out[rows, outputs], and of the panel's `element`s: np.float32 as
    [inputs, WIDTH], or np.uint16 for bfloat16 as [inputs / 2, WIDTH, 2], where a pair of inputs shares 32 bits, or
    np.int8 as [inputs, WIDTH].
    Meanwhile as many bytes from `ahead` on are fetched as `ahead_step` for each input: what is read next.
    """

    def generate(context, builder, signature, arguments):
        rows, *rest, _ = arguments
        kind = {types.float32: _FLOAT, types.uint16: _INT, types.int8: _BYTE}[signature.args[9].instance_type]
        done = builder.append_basic_block("done")
        cases = builder.switch(rows, done)
        for count in range(1, _TILE_ROWS + 1):
            block = builder.append_basic_block(f"rows_{count}")
            cases.add_case(_word(count), block)
            builder.position_at_end(block)
            _generate_tile(builder, count, kind, *rest)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(*[integer] * 9, element), generate


def _generate_tile(builder, rows, kind, x, panel, out, depth, inputs, outputs, ahead, ahead_step):
    """As many columns at a time as there are registers for; each lot fetches its share, so that memory never rests."""
    columns = min(WIDTH, _SUMS // rows * _LANES)
    columns = next(size for size in range(columns, 0, -_LANES) if WIDTH % size == 0)
    x = builder.inttoptr(x, _FLOAT.as_pointer())
    out = builder.inttoptr(out, _FLOAT.as_pointer())
    panel = builder.inttoptr(panel, kind.as_pointer())
    lots = WIDTH // columns
    share = builder.udiv(ahead_step, _word(lots))
    for lot in range(lots):
        start = builder.add(ahead, builder.mul(builder.mul(depth, share), _word(lot)))
        taken = range(lot * columns, (lot + 1) * columns, _LANES)
        fetch = _Fetch(start, share, max(WIDTH // lots * _num_bytes(kind) // _CACHE_LINE, 1))
        _generate_columns(builder, rows, taken, kind, x, panel, out, depth, inputs, outputs, fetch)


def _generate_columns(builder, rows, columns, kind, x, panel, out, depth, inputs, outputs, fetch):
    row_starts = [builder.gep(x, [builder.mul(inputs, _word(row))]) for row in range(rows)]
    targets = [
        [_vector_at(builder, out, builder.add(builder.mul(outputs, _word(row)), _word(column))) for column in columns]
        for row in range(rows)
    ]
    sums = [[cgutils.alloca_once(builder, _FLOATS) for _ in columns] for _ in range(rows)]

    def copy(sources, destinations, **load):
        for source, destination in zip(chain(*sources), chain(*destinations), strict=True):
            builder.store(builder.load(source, **load), destination, align=4)

    def add(index, weights):
        for start, places in zip(row_starts, sums, strict=True):
            number = _broadcast(builder, builder.load(builder.gep(start, [index]), align=4))
            for place, weight in zip(places, weights, strict=True):
                term = builder.fmul(number, weight, flags=("contract",))
                builder.store(builder.fadd(builder.load(place), term, flags=("contract",)), place)

    def load(line):
        start = builder.gep(panel, [builder.mul(line, _word(WIDTH))])
        vector = ir.VectorType(kind, _LANES).as_pointer()
        places = (builder.bitcast(builder.gep(start, [_word(column)]), vector) for column in columns)
        return [builder.load(place, align=_num_bytes(kind)) for place in places]

    copy(targets, sums, align=4)
    taken = 2 if kind is _INT else 1
    with cgutils.for_range_slice(builder, _word(0), depth, _word(taken)) as (index, _):
        _generate_fetch(builder, index, taken, fetch)
        if kind is _INT:
            both = load(builder.lshr(index, _word(1)))
            low = [builder.shl(bits, ir.Constant(_INTS, [16] * _LANES)) for bits in both]
            high = [builder.and_(bits, ir.Constant(_INTS, [0xFFFF0000] * _LANES)) for bits in both]
            add(index, [builder.bitcast(bits, _FLOATS) for bits in low])
            add(builder.add(index, _word(1)), [builder.bitcast(bits, _FLOATS) for bits in high])
        elif kind is _BYTE:
            add(index, [builder.sitofp(builder.sext(numbers, _INTS), _FLOATS) for numbers in load(index)])
        else:
            add(index, load(index))
    copy(sums, targets)


def _vector_at(builder, numbers, index):
    return builder.bitcast(builder.gep(numbers, [index]), _FLOATS.as_pointer())


def _generate_fetch(builder, index, inputs, fetch):
    first = builder.add(fetch.start, builder.mul(index, fetch.step))
    part = builder.udiv(builder.mul(fetch.step, _word(inputs)), _word(fetch.lines))
    for line in range(fetch.lines):
        generate_prefetch(builder, builder.add(first, builder.mul(part, _word(line))))


def _num_bytes(kind):
    return 4 if kind is _FLOAT else kind.width // 8


def _word(number):
    return ir.Constant(_WORD, number)


def _broadcast(builder, number):
    undefined = ir.Constant(_FLOATS, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_INT, _LANES), [0] * _LANES))


@njit(nogil=True, error_model="numpy", cache=True)
def work(address, element):
    """Do panels of the job at `address` until there are none left."""
    job = words(address, JOB_WORDS)
    outputs, rows = job[OUTPUTS], job[ROWS]
    panel_bytes = job[INPUTS] * WIDTH * num_bytes(element)
    edge_RW = np.empty((rows, WIDTH), np.float32)
    panel = next_item(address)
    while panel < job[NUM_ITEMS]:
        upcoming = next_item(address)
        weights = job[PANELS] + panel * panel_bytes
        ahead = job[PANELS] + min(upcoming, job[NUM_ITEMS] - 1) * panel_bytes
        kept = min(outputs - panel * WIDTH, WIDTH)
        out = job[OUT] + 4 * panel * WIDTH
        if kept == WIDTH:
            for r in range(rows):
                carray(as_pointer(out + 4 * r * outputs), (WIDTH,), np.float32)[:] = 0
            _add_panel(job, weights, ahead, out, outputs, element)
        else:
            edge_RW[:] = 0
            _add_panel(job, weights, ahead, edge_RW.ctypes.data, WIDTH, element)
            for r in range(rows):
                carray(as_pointer(out + 4 * r * outputs), (kept,), np.float32)[:] = edge_RW[r, :kept]
        item_done(address)
        panel = upcoming


@njit(nogil=True, error_model="numpy", cache=True)
def _add_panel(job, weights, ahead, out, outputs, element):
    """A block of inputs at a time, small enough to stay near while all rows meet it, and the next one on its way.

    Blocks are of one size, so that each fetches the whole of the next.
    """
    rows, inputs = job[ROWS], job[INPUTS]
    line_bytes = WIDTH * num_bytes(element)
    num_blocks = (inputs + _BLOCK - 1) // _BLOCK
    block_inputs = (inputs + num_blocks - 1) // num_blocks
    block_inputs += block_inputs % 2
    for first in range(0, inputs, block_inputs):
        depth = min(inputs - first, block_inputs)
        soon = weights + (first + block_inputs) * line_bytes if first + block_inputs < inputs else ahead
        for row in range(0, rows, _TILE_ROWS):
            count = min(rows - row, _TILE_ROWS)
            ahead_step = line_bytes * count // rows
            x = job[X] + 4 * (row * inputs + first)
            block = weights + first * line_bytes
            _add_tile(count, x, block, out + 4 * row * outputs, depth, inputs, outputs, soon, ahead_step, element)
            soon += ahead_step * depth
