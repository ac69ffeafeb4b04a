"""What Numba's subset of Python lacks: vectors of 16 floats, raw addresses, atomics, calls through pointers.

No annotations here: Numba types these functions from the LLVM types that each one states.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

LANES = 16
"""Floats in a vector; where the processor has shorter ones, LLVM takes several."""
HEADS_AT_ONCE = 4
"""Whose sums have room in registers."""
_UNROLL = (0, 4, 2, 2, 1)  # partial sums of so many heads, so that a product need not wait for the one before
_FLOAT, _INT, _WORD = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)


@intrinsic
def as_pointer(typing_context, address):
    """An integer as a `void *`."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def as_float(typing_context, bits):
    """The float32 with these 32 bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.uint32), generate


@intrinsic
def as_bits(typing_context, number):
    """The 32 bits of a float32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _INT)

    return types.uint32(types.float32), generate


@intrinsic
def fetch_add(typing_context, address, amount):
    """Add to the int64 at `address`, for all threads to see, and return what was there before."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], _WORD.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


def generate_prefetch(builder, address):
    """For intrinsics: start to bring the cache line at `address` near."""
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _INT, _INT, _INT])
    for_reading, near_l2, data = (ir.Constant(_INT, number) for number in (0, 2, 1))
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(prefetch, [pointer, for_reading, near_l2, data])


@intrinsic
def call(typing_context, function, argument):
    """Call the C function at an address with one pointer; the pointer that it returns, as an integer."""

    def generate(context, builder, signature, arguments):
        void_p = ir.IntType(8).as_pointer()
        target = builder.inttoptr(arguments[0], ir.FunctionType(void_p, [void_p]).as_pointer())
        return builder.ptrtoint(builder.call(target, [builder.inttoptr(arguments[1], void_p)]), _WORD)

    return types.int64(types.int64, types.int64), generate


def address_of(symbol):
    """An intrinsic: the address that `llvmlite.binding.add_symbol` gave to this name, found when code is loaded. Unlike
    a constant it is right in code that comes from Numba's cache."""

    @intrinsic
    def find(typing_context):
        def generate(context, builder, signature, arguments):
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()])
            return builder.ptrtoint(cgutils.get_or_insert_function(builder.module, kind, symbol), _WORD)

        return types.int64(), generate

    return find


@intrinsic
def add_weighted(typing_context, heads, out, out_step, weights, weights_step, rows, count, stride, ahead, element):
    """out[h * out_step :][:16] += sum of weights[h * weights_step + i] * rows[i * stride :][:16] for i < count, for
    each h < heads, at most HEADS_AT_ONCE, which share what they read.

    `out` and `weights` are addresses of float32, `rows` of `element`: np.float32, or np.uint16 for bfloat16. Meanwhile
    count * 16 elements from `ahead` on are fetched: what is read next.
    """

    def generate(context, builder, signature, arguments):
        heads, out, out_step, weights, weights_step, rows, count, stride, ahead, _ = arguments
        kind = ir.IntType(16) if _is_bfloat16(signature.args[9]) else _INT
        outs, weights = (builder.inttoptr(address, _FLOAT.as_pointer()) for address in (out, weights))
        rows = builder.inttoptr(rows, kind.as_pointer())
        done = builder.append_basic_block("done")
        switch = builder.switch(heads, done)
        for count_of_heads in range(1, HEADS_AT_ONCE + 1):
            block = builder.append_basic_block(f"heads_{count_of_heads}")
            switch.add_case(ir.Constant(_WORD, count_of_heads), block)
            with builder.goto_block(block):
                numbers = [ir.Constant(_WORD, head) for head in range(count_of_heads)]
                targets = [builder.gep(outs, [builder.mul(out_step, number)]) for number in numbers]
                of_heads = [builder.gep(weights, [builder.mul(weights_step, number)]) for number in numbers]
                _add_weighted(builder, targets, of_heads, rows, count, stride, ahead, kind)
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, word, word, word, word, word, word, word, word, element), generate


def _add_weighted(builder, targets, weights, rows, count, stride, ahead, kind):
    unroll = _UNROLL[len(targets)]
    sums = [[cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, None)) for _ in targets] for _ in range(unroll)]

    def add(index, places):
        fetched = builder.mul(index, ir.Constant(_WORD, LANES * kind.width // 8))
        generate_prefetch(builder, builder.add(ahead, fetched))
        row = _load_floats(builder, builder.gep(rows, [builder.mul(index, stride)]), kind)
        for of_head, place in zip(weights, places, strict=True):
            weight = _broadcast(builder, builder.load(builder.gep(of_head, [index]), align=4))
            term = builder.fmul(weight, row, flags=("contract",))
            builder.store(builder.fadd(builder.load(place), term, flags=("contract",)), place)

    whole = builder.and_(count, ir.Constant(_WORD, -unroll))
    with cgutils.for_range_slice(builder, ir.Constant(_WORD, 0), whole, ir.Constant(_WORD, unroll)) as (index, _):
        for lane, places in enumerate(sums):
            add(builder.add(index, ir.Constant(_WORD, lane)), places)
    with cgutils.for_range_slice(builder, whole, count, ir.Constant(_WORD, 1)) as (index, _):
        add(index, sums[0])
    for head, start in enumerate(targets):
        target = builder.bitcast(start, _VECTOR.as_pointer())
        total = builder.load(target, align=4)
        for places in sums:
            total = builder.fadd(total, builder.load(places[head]))
        builder.store(total, target, align=4)


def _broadcast(builder, number):
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_INT, LANES), [0] * LANES))


def _load_floats(builder, pointer, kind):
    """16 stored elements as float32; bfloat16 is the upper half of a float32."""
    stored = builder.load(builder.bitcast(pointer, ir.VectorType(kind, LANES).as_pointer()), align=kind.width // 8)
    if kind.width == 16:
        wide = ir.VectorType(_INT, LANES)
        stored = builder.shl(builder.zext(stored, wide), ir.Constant(wide, [16] * LANES))
    return builder.bitcast(stored, _VECTOR)


def widen(x):
    """A stored element as float32; see the overload."""
    raise NotImplementedError


@overload(widen, inline="always")
def _widen(x):
    if x == types.uint16:
        return lambda x: as_float(np.uint32(x) << np.uint32(16))
    return lambda x: x


def narrow(x, element):
    """A float32 as `element`, np.float32 or np.uint16 for bfloat16, rounded to the nearest even; see the overload."""
    raise NotImplementedError


@overload(narrow, inline="always")
def _narrow(x, element):
    if not _is_bfloat16(element):
        return lambda x, element: x

    def to_bfloat16(x, element):
        bits = as_bits(x)
        return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

    return to_bfloat16


def num_bytes(element):
    """Size of np.float32, np.uint16 or np.int8; see the overload."""
    raise NotImplementedError


@overload(num_bytes, inline="always")
def _num_bytes(element):
    if element.instance_type == types.int8:
        return lambda element: 1
    return (lambda element: 2) if _is_bfloat16(element) else (lambda element: 4)


def _is_bfloat16(element):
    return element.instance_type == types.uint16
