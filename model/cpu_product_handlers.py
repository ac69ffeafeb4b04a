"""Entries into the CPU's product kernel: XLA's call frame becomes a job of `model.cpu_product`."""

import numpy as np
from numba import carray, njit

from model.cpu_calls import answer_metadata, argument, finish, let_go, new_job, result, wake_helpers, words
from model.cpu_product import INPUTS, JOB_WORDS, OUT, OUTPUTS, PANELS, ROWS, WIDTH, X, work
from model.cpu_simd import address_of, as_pointer, num_bytes

_WORK_WORTH_A_THREAD = 1 << 20  # of weights times rows; to wake a thread costs about as much
_READING_ONE = 16  # to read a weight costs about as much as to multiply it with so many rows


@njit(cache=True)
def _serve(frame, task, element):
    """Arguments: x_RI, panels [L, panels, I, WIDTH] (bfloat16 as pairs), layer_1. Result: out_RO."""
    x, x_shape = argument(frame, 0, 3)
    panels, panels_shape = argument(frame, 1, 3)
    layer = carray(as_pointer(argument(frame, 2, 3)[0]), (1,), np.int32)[0]
    out, out_shape = result(frame, 0, 1)
    rows, inputs = words(x_shape, 2)
    num_panels = words(panels_shape, 2)[1]
    address = new_job(JOB_WORDS, num_panels)
    job = words(address, JOB_WORDS)
    job[X], job[OUT], job[ROWS], job[INPUTS], job[OUTPUTS] = x, out, rows, inputs, words(out_shape, 2)[1]
    job[PANELS] = panels + layer * num_panels * inputs * WIDTH * num_bytes(element)
    if num_panels * WIDTH * inputs * (rows + _READING_ONE) >= 2 * _WORK_WORTH_A_THREAD:
        wake_helpers(frame, address, task)
    work(address, element)
    finish(address)


_float32_task = address_of("podstream_product_float32_task")
_bfloat16_task = address_of("podstream_product_bfloat16_task")
_int8_task = address_of("podstream_product_int8_task")


def _help_float32(address):
    work(address, np.float32)
    let_go(address)


def _help_bfloat16(address):
    work(address, np.uint16)
    let_go(address)


def _help_int8(address):
    work(address, np.int8)
    let_go(address)


def _handle_float32(frame):
    frame_words = carray(frame, (15,), np.int64)
    if not answer_metadata(frame_words):
        _serve(frame_words, _float32_task(), np.float32)
    return 0  # no error


def _handle_bfloat16(frame):
    frame_words = carray(frame, (15,), np.int64)
    if not answer_metadata(frame_words):
        _serve(frame_words, _bfloat16_task(), np.uint16)
    return 0


def _handle_int8(frame):
    frame_words = carray(frame, (15,), np.int64)
    if not answer_metadata(frame_words):
        _serve(frame_words, _int8_task(), np.int8)
    return 0


ENTRIES = {
    "float32": (_help_float32, _handle_float32),
    "bfloat16": (_help_bfloat16, _handle_bfloat16),
    "int8": (_help_int8, _handle_int8),
}
"""What `model.cpu_calls.register` takes, for weights of each type of `model.packed.DTYPES`."""
