"""The C library's heap: what is freed goes back to the system, at once while weights are read, and once when programs
have been compiled, of which it would keep half a GiB."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_ of glibc's malloc.h
_CHUNK_BYTES = 1 << 20
_MOST_BYTES = 32 << 20  # to which glibc lets the threshold grow by itself


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Within, buffers of a MiB and more are mapped and unmapped one by one.

    By itself glibc learns from the first freed chunk to keep such buffers, a few dozen MiB by chance. Afterwards it
    keeps them as it would have learned to: a step's temporaries must not be mapped anew each time. With other C
    libraries nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _CHUNK_BYTES)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _MOST_BYTES)
        mallopt(_TRIM_THRESHOLD, 2 * _MOST_BYTES)


def give_back() -> None:
    """All that is free now. With other C libraries than glibc nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
