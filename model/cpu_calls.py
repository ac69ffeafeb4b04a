"""XLA's side of a CPU kernel: reads a call, shares its work with XLA's own threads, and waits for them.

XLA calls a handler with a call frame, laid down in `xla/ffi/api/c_api.h` (the public and versioned C API that
`jax.ffi.include_dir()` points to). Read as 64-bit words: frame[1] extensions, frame[2] the API table, frame[3] the
context, frame[9] the arguments, frame[14] the results; of each buffer, word 3 is the data and word 5 the dimensions; of
the API table, word 17 schedules a task and word 18 tells the number of threads.

The work of a call is cut into items, which threads take from a common counter. Its job is a block of words: those of
the header here, then what the kernel needs. No annotations: Numba compiles from the types of a call.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from llvmlite import binding
from numba import carray, cfunc, njit, types

from model.cpu_simd import as_pointer, call, fetch_add

NEXT_ITEM, NUM_ITEMS, ITEMS_DONE, USERS = range(4)
HEADER_WORDS = 4
SCHEDULE, NUM_THREADS = 17, 18
_METADATA = 1  # XLA_FFI_Extension_Metadata: XLA asks which API version the handler speaks
WORD = types.int64
_malloc = types.ExternalFunction("malloc", WORD(WORD))
_free = types.ExternalFunction("free", types.void(WORD))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


def register(name: str, help_out: Callable[..., Any], handle: Callable[..., Any]) -> object:
    """Compile a kernel's two entries, and make `handle` known to XLA in this process as the target `name` for CPUs.

    `handle` takes a call frame, and finds by the symbol `name`_task what other threads call with a job: `help_out`.
    Returns what must live as long as the kernel is used. Slow once, then from Numba's cache.
    """
    task = cfunc(types.void(WORD), cache=True)(help_out)
    binding.add_symbol(f"{name}_task", task.address)
    handler = cfunc(WORD(types.CPointer(WORD)), cache=True)(handle)
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(name, capsule(handler.address, None, None), platform="cpu")
    return handler, task


@njit(cache=True)
def words(address, count):
    return carray(as_pointer(address), (count,), np.int64)


@njit(cache=True)
def answer_metadata(frame):
    """Whether this call only asks for the API version; then it has been answered with the caller's own."""
    if frame[1] == 0:
        return False
    extension = words(frame[1], 4)
    if extension[1] & 0xFFFFFFFF != _METADATA:
        return False
    words(extension[3], 4)[3] = words(frame[2], 5)[4]
    return True


@njit(cache=True)
def argument(frame, index, num_arguments):
    """(address of the data, address of the dimensions as int64) of an argument."""
    buffer = words(words(frame[9], num_arguments)[index], 6)
    return buffer[3], buffer[5]


@njit(cache=True)
def result(frame, index, num_results):
    """(address of the data, address of the dimensions as int64) of a result."""
    buffer = words(words(frame[14], num_results)[index], 6)
    return buffer[3], buffer[5]


@njit(cache=True)
def new_job(num_words, num_items):
    """Address of a job with its header filled in; this thread is its one user."""
    address = _malloc(8 * num_words)
    header = words(address, HEADER_WORDS)
    header[NEXT_ITEM] = header[ITEMS_DONE] = 0
    header[NUM_ITEMS] = num_items
    header[USERS] = 1
    return address


@njit(cache=True)
def wake_helpers(frame, address, task):
    """Have `task` called with the job by as many other threads as there are, and as there are items for."""
    num_threads = np.zeros(1, np.int64)
    request = np.array([32, 0, frame[3], num_threads.ctypes.data], np.int64)
    if call(words(frame[2], 19)[NUM_THREADS], request.ctypes.data) != 0:
        return
    for _ in range(min(num_threads[0], words(address, HEADER_WORDS)[NUM_ITEMS]) - 1):
        fetch_add(address + 8 * USERS, 1)
        request = np.array([40, 0, frame[3], task, address], np.int64)
        if call(words(frame[2], 19)[SCHEDULE], request.ctypes.data) != 0:
            fetch_add(address + 8 * USERS, -1)


@njit(inline="always")
def next_item(address):
    """An item that is nobody else's; not less than the job's NUM_ITEMS when there are none left."""
    return fetch_add(address + 8 * NEXT_ITEM, 1)


@njit(inline="always")
def item_done(address):
    fetch_add(address + 8 * ITEMS_DONE, 1)


@njit(cache=True)
def finish(address):
    """Wait until all items are done, and let go of the job."""
    while fetch_add(address + 8 * ITEMS_DONE, 0) < words(address, HEADER_WORDS)[NUM_ITEMS]:
        _sched_yield()
    let_go(address)


@njit(cache=True)
def let_go(address):
    """Whoever lets go last frees the job: a helper may come so late that the call is over."""
    if fetch_add(address + 8 * USERS, -1) == 1:
        _free(address)
