"""Numba's own cache looks at one file; ours at all that a kernel is made of."""

import sys
from subprocess import run

import pytest

KERNEL = """
from numba import njit
from part import part

@njit(cache=True)
def kernel():
    return part()
"""
PART = """
from numba import njit

@njit(cache=True)
def part():
    return {answer}
"""
USE = """
from pathlib import Path
from model.cpu_cache import kept_kernels
here = Path({here!r})
with kept_kernels(here, here.glob("*.py")):
    from kernel import kernel
    print(kernel())
"""


@pytest.fixture
def answer(tmp_path):
    """What the kernel says in a process of its own, once its part is to answer so."""

    def ask(wanted):
        (tmp_path / "part.py").write_text(PART.format(answer=wanted))
        process = [sys.executable, "-c", USE.format(here=str(tmp_path))]
        told = run(process, capture_output=True, text=True, check=True, env={"PYTHONPATH": f"{tmp_path}:."})
        return int(told.stdout)

    (tmp_path / "kernel.py").write_text(KERNEL)
    return ask


def test_a_change_behind_a_kernel_is_seen_and_what_was_kept_before_is_removed(answer, tmp_path):
    assert [answer(1), answer(2), answer(1)] == [1, 2, 1]
    assert len(list((tmp_path / "__pycache__").glob("kernels-*"))) == 1


def test_a_folder_that_cannot_be_written_keeps_nobody_from_computing(answer, tmp_path):
    (tmp_path / "__pycache__").write_text("in the way")
    assert answer(3) == 3
