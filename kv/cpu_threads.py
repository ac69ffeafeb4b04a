"""XLA's side of the CPU kernel: reads a call, shares its work with XLA's own threads, and waits for them.

XLA calls a handler with a call frame, laid down in `xla/ffi/api/c_api.h` (the public and versioned C API that
`jax.ffi.include_dir()` points to). Read as 64-bit words: frame[1] extensions, frame[2] the API table, frame[3] the
context, frame[9] the arguments, frame[14] the results; of each buffer, word 3 is the data and word 5 the dimensions; of
the API table, word 17 schedules a task and word 18 tells the number of threads.
"""

from typing import Any

import numpy as np
from llvmlite import binding
from numba import carray, cfunc, njit, types

from kv import cpu_kernel
from kv.cpu_kernel import ITEMS_DONE, JOB_WORDS, KV_HEADS, NEXT_ITEM, OUT, POSITIONS, ROWS, USERS, work
from kv.cpu_simd import address_of, as_pointer, call, fetch_add

_METADATA = 1  # XLA_FFI_Extension_Metadata: XLA asks which API version the handler speaks
SCHEDULE, NUM_THREADS = 17, 18
_KEYS_WORTH_A_THREAD = 256  # keys of one head; to wake a thread costs about as much as so few
_WORD = types.int64
_malloc = types.ExternalFunction("malloc", _WORD(_WORD))
_free = types.ExternalFunction("free", types.void(_WORD))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@njit(cache=True)
def _words(address, count):
    return carray(as_pointer(address), (count,), np.int64)


@njit(cache=True)
def _answer_metadata(frame):
    """Whether this call only asks for the API version; then it has been answered with the caller's own."""
    if frame[1] == 0:
        return False
    extension = _words(frame[1], 4)
    if extension[1] & 0xFFFFFFFF != _METADATA:
        return False
    _words(extension[3], 4)[3] = _words(frame[2], 5)[4]
    return True


@njit(cache=True)
def _new_job(frame):
    """Arguments: q_SNH, k_SKH, v_SKH, k_LPKHG, v_LPKGH, pages_SJ, positions_S, layer_1. Results: out_SNH, the pools."""
    arguments, results = _words(frame[9], 8), _words(frame[14], 3)
    address = _malloc(8 * JOB_WORDS)
    job = _words(address, JOB_WORDS)
    for field in range(POSITIONS + 1):
        job[field] = _words(arguments[field], 6)[3]
    job[OUT] = _words(results[0], 6)[3]
    job[cpu_kernel.LAYER] = carray(as_pointer(_words(arguments[7], 6)[3]), (1,), np.int32)[0]
    queries = _words(_words(arguments[0], 6)[5], 3)
    pool = _words(_words(arguments[4], 6)[5], 5)
    job[ROWS], job[cpu_kernel.HEADS], job[cpu_kernel.HEAD_DIM] = queries[0], queries[1], queries[2]
    job[cpu_kernel.PAGES_IN_POOL], job[KV_HEADS], job[cpu_kernel.PAGE_SIZE] = pool[1], pool[2], pool[3]
    job[cpu_kernel.PAGES_PER_ROW] = _words(_words(arguments[5], 6)[5], 2)[1]
    job[NEXT_ITEM] = job[ITEMS_DONE] = 0
    job[USERS] = 1
    return address


@njit(cache=True)
def _num_helpers(frame, job):
    """Threads to wake beside this one: as many as there are, but none for work that is over before one comes."""
    positions_S = carray(as_pointer(job[POSITIONS]), (job[ROWS],), np.int32)
    num_keys = 0
    for s in range(job[ROWS]):
        num_keys += max(np.int64(positions_S[s]) + 1, 0)
    if num_keys * job[KV_HEADS] < 2 * _KEYS_WORTH_A_THREAD:
        return 0
    threads = np.zeros(1, np.int64)
    request = np.array([32, 0, frame[3], threads.ctypes.data], np.int64)
    if call(_words(frame[2], 19)[NUM_THREADS], request.ctypes.data) != 0:
        return 0
    return min(threads[0], job[ROWS] * job[KV_HEADS]) - 1


@njit(cache=True)
def _serve(frame, task, element):
    """Whoever lets go of the job last frees it: a helper may come so late that this call is over."""
    address = _new_job(frame)
    job = _words(address, JOB_WORDS)
    for _ in range(_num_helpers(frame, job)):
        fetch_add(address + 8 * USERS, 1)
        request = np.array([40, 0, frame[3], task, address], np.int64)
        if call(_words(frame[2], 19)[SCHEDULE], request.ctypes.data) != 0:
            fetch_add(address + 8 * USERS, -1)
    work(address, element)
    while fetch_add(address + 8 * ITEMS_DONE, 0) < job[ROWS] * job[KV_HEADS]:
        _sched_yield()
    _let_go(address)


@njit(cache=True)
def _let_go(address):
    if fetch_add(address + 8 * USERS, -1) == 1:
        _free(address)


_float32_task = address_of("podstream_float32_task")
_bfloat16_task = address_of("podstream_bfloat16_task")


def _help_float32(address):
    work(address, np.float32)
    _let_go(address)


def _help_bfloat16(address):
    work(address, np.uint16)
    _let_go(address)


def _handle_float32(frame):
    words = carray(frame, (15,), np.int64)
    if not _answer_metadata(words):
        _serve(words, _float32_task(), np.float32)
    return 0  # no error


def _handle_bfloat16(frame):
    words = carray(frame, (15,), np.int64)
    if not _answer_metadata(words):
        _serve(words, _bfloat16_task(), np.uint16)
    return 0


def compile_handler(dtype: str) -> tuple[Any, Any]:
    """The handler for pools of `dtype`, `float32` or `bfloat16`, with its `address`, and what must live as long as it.

    Slow once, then from Numba's cache.
    """
    help_out, handle = {
        "float32": (_help_float32, _handle_float32),
        "bfloat16": (_help_bfloat16, _handle_bfloat16),
    }[dtype]
    task = cfunc(types.void(_WORD), cache=True)(help_out)
    binding.add_symbol(f"podstream_{dtype}_task", task.address)
    handler = cfunc(_WORD(types.CPointer(_WORD)), cache=True)(handle)
    return handler, task
