"""CPU kernels read XLA's structs by position."""

import re
from pathlib import Path

import jax

from model import cpu_calls


def test_the_words_of_the_api_table_are_those_of_this_jax():
    """A jax that moved a field must fail here, not crash there."""
    header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    table = header.split("struct XLA_FFI_Api {")[1].split("};")[0]
    functions = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", table)
    before = 2 + 3 + 1  # size and extensions, the version's three words, the internal table
    assert before + functions.index("XLA_FFI_ThreadPool_Schedule") == cpu_calls.SCHEDULE
    assert before + functions.index("XLA_FFI_ThreadPool_NumThreads") == cpu_calls.NUM_THREADS
    frame = header.split("struct XLA_FFI_CallFrame {")[1].split("};")[0]
    fields = re.findall(r"(\w+);", re.sub(r"//.*", "", frame))
    assert fields[:7] == ["struct_size", "extension_start", "api", "ctx", "stage", "args", "rets"]
