"""Numba's own cache looks at one file; ours at all that a kernel is made of."""

import sys
from pathlib import Path
from subprocess import run

import numba
import pytest

from model.cpu_cache import kept_kernels
from tests.damage import DAMAGES

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
        ask.words = told.stderr
        return int(told.stdout)

    (tmp_path / "kernel.py").write_text(KERNEL)
    return ask


def test_a_change_behind_a_kernel_is_seen_and_what_was_kept_before_is_removed(answer, tmp_path):
    assert [answer(1), answer(2), answer(1)] == [1, 2, 1]
    assert len(list((tmp_path / "__pycache__").glob("kernels-*"))) == 1


def test_a_folder_that_cannot_be_written_keeps_nobody_from_computing(answer, tmp_path):
    (tmp_path / "__pycache__").write_text("in the way")
    assert answer(3) == 3


CALLS_ANOTHER = """
from numba import njit
from part import part

@njit(cache=True)
def kernel():
    return part(1.5)
"""
ANOTHER = """
from numba import njit

@njit(cache=True)
def part(x):
    return x
"""
USE_BOTH = """
from pathlib import Path
from model.cpu_cache import kept_kernels
one, two = Path({one!r}), Path({two!r})
with kept_kernels(one, one.glob("*.py")):
    from part import part
    part(1)
with kept_kernels(one, one.glob("*.py")), kept_kernels(two, two.glob("*.py")):
    from kernel import kernel
    print(kernel())
"""


@pytest.fixture
def use_both(tmp_path):
    """Words of a process that has a kernel compiled which calls another package's."""
    one, two, temporary = (tmp_path / name for name in ("one", "two", "tmp"))
    for folder in (one, two, temporary):
        folder.mkdir()
    (one / "part.py").write_text(ANOTHER)
    (two / "kernel.py").write_text(CALLS_ANOTHER)
    process = [sys.executable, "-c", USE_BOTH.format(one=str(one), two=str(two))]
    env = {"PYTHONPATH": f"{one}:{two}:.", "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"}

    def use():
        told = run(process, capture_output=True, text=True, check=True, env=env)
        assert told.stdout == "1.5\n"
        return told.stderr

    return use


def test_a_kernel_that_calls_another_is_no_damage_to_what_is_kept_of_that(use_both):
    assert [use_both(), use_both()] == ["", ""]


def test_where_nothing_can_be_kept_nothing_is_left(use_both, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / "__pycache__").write_text("in the way")
    use_both()
    assert not list((tmp_path / "tmp").iterdir())


def keep(package):
    """Whether the kernel was there; else it is made."""
    with kept_kernels(package, []):
        kernel = Path(numba.config.CACHE_DIR) / "a" / "kernel.nbc"
        was_there = kernel.is_file()
        kernel.parent.mkdir(exist_ok=True)
        kernel.write_bytes(b"a kernel")
    return was_there


@pytest.fixture(autouse=True)
def no_other_cache(monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["kernel.nbc", "podstream.sha256"])
def test_what_is_damaged_is_made_anew_and_that_is_said(tmp_path, caplog, file, damage):
    assert [keep(tmp_path), keep(tmp_path)] == [False, True]
    [path] = tmp_path.rglob(file)
    DAMAGES[damage](path)
    assert keep(tmp_path) is False
    assert "compiling them anew" in caplog.text
    caplog.clear()
    assert keep(tmp_path) is True
    assert not caplog.text


def test_a_start_that_was_killed_leaves_nothing_that_is_trusted(tmp_path):
    with pytest.raises(KeyboardInterrupt), kept_kernels(tmp_path, []):
        (Path(numba.config.CACHE_DIR) / "kernel.nbc").write_bytes(b"half a ker")
        raise KeyboardInterrupt
    assert keep(tmp_path) is False


def test_a_cut_kernel_of_numba_does_not_end_the_process(answer, tmp_path):
    assert answer(1) == 1
    DAMAGES["cut"](next((tmp_path / "__pycache__").rglob("*.nbc")))
    assert answer(1) == 1
    assert "compiling them anew" in answer.words
