"""Entries into the CPU's decode kernel: XLA's call frame becomes a job of `kv.cpu_kernel`."""

import numpy as np
from numba import carray, njit

from kv import cpu_kernel
from kv.cpu_kernel import JOB_WORDS, KV_HEADS, OUT, POSITIONS, QUERIES, ROWS, work
from model.cpu_calls import answer_metadata, argument, finish, let_go, new_job, result, wake_helpers, words
from model.cpu_simd import address_of, as_pointer

_KEYS_WORTH_A_THREAD = 256  # keys of one head; to wake a thread costs about as much as so few
_NUM_ARGUMENTS, _NUM_RESULTS = 8, 3
_NO_WINDOW = 1 << 30


@njit(cache=True)
def _job(frame):
    """Arguments: q_SNH, k_SKH, v_SKH, k_LPKHG, v_LPKGH, pages_SJ, positions_S, and the layer, perhaps with window and
    soft cap. Results: out_SNH, the pools."""
    queries = words(argument(frame, 0, _NUM_ARGUMENTS)[1], 3)
    pool = words(argument(frame, 4, _NUM_ARGUMENTS)[1], 5)
    address = new_job(JOB_WORDS, queries[0] * pool[2])
    job = words(address, JOB_WORDS)
    for number in range(_NUM_ARGUMENTS - 1):
        job[QUERIES + number] = argument(frame, number, _NUM_ARGUMENTS)[0]
    job[OUT] = result(frame, 0, _NUM_RESULTS)[0]
    settings, settings_shape = argument(frame, 7, _NUM_ARGUMENTS)
    num_settings = words(settings_shape, 1)[0]
    setting = carray(as_pointer(settings), (num_settings,), np.int32)
    job[cpu_kernel.LAYER] = setting[0]
    job[cpu_kernel.WINDOW], job[cpu_kernel.CAP_BITS] = _NO_WINDOW, 0
    if num_settings == 3:
        job[cpu_kernel.WINDOW], job[cpu_kernel.CAP_BITS] = setting[1], setting[2]
    job[ROWS], job[cpu_kernel.HEADS], job[cpu_kernel.HEAD_DIM] = queries[0], queries[1], queries[2]
    job[cpu_kernel.PAGES_IN_POOL], job[KV_HEADS], job[cpu_kernel.PAGE_SIZE] = pool[1], pool[2], pool[3]
    job[cpu_kernel.PAGES_PER_ROW] = words(argument(frame, 5, _NUM_ARGUMENTS)[1], 2)[1]
    return address


@njit(cache=True)
def _is_worth_threads(address):
    """Whether the work is not over before another thread comes."""
    job = words(address, JOB_WORDS)
    positions_S = carray(as_pointer(job[POSITIONS]), (job[ROWS],), np.int32)
    num_keys = 0
    for s in range(job[ROWS]):
        num_keys += max(np.int64(positions_S[s]) + 1, 0)
    return num_keys * job[KV_HEADS] >= 2 * _KEYS_WORTH_A_THREAD


@njit(cache=True)
def _serve(frame, task, element):
    address = _job(frame)
    if _is_worth_threads(address):
        wake_helpers(frame, address, task)
    work(address, element)
    finish(address)


_float32_task = address_of("podstream_decode_float32_task")
_bfloat16_task = address_of("podstream_decode_bfloat16_task")


def _help_float32(address):
    work(address, np.float32)
    let_go(address)


def _help_bfloat16(address):
    work(address, np.uint16)
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


ENTRIES = {
    "float32": (_help_float32, _handle_float32),
    "bfloat16": (_help_bfloat16, _handle_bfloat16),
}
"""What `model.cpu_calls.register` takes, for pools of each type of `kv.cpu_attention.DTYPES`."""
