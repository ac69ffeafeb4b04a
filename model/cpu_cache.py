"""Where Numba keeps compiled kernels: a folder for each state of their sources, and a sum over all that lies in it.

Numba compares the time of one file, that of the function it is asked for, and would run what an older version of the
other files compiled to. Two processes that save at once can take the same file for different code. And it loads
whatever it finds: an emptied file raises, a cut one may end the process.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import numba

from model.file_lock import file_lock
from model.kept_sum import why_not_as_left

logger = logging.getLogger(__name__)

_PREFIX = "kernels-"
_SUM = "podstream.sha256"


@contextmanager
def kept_kernels(package: Path, sources: Iterable[Path]) -> Iterator[None]:
    """Within, kernels are imported, compiled, and kept in `package`'s `__pycache__`, apart from those of other sources.
    By one process at a time: the next finds them made.

    What is not as it was left is made anew. Where the folder cannot be written, nothing is kept.

    Numba keeps what a function is compiled to beside where it was imported, whoever has it compiled: kernels that call
    others are compiled within both.
    """
    caches, digest = package / "__pycache__", _digest(sources)
    folder, lock = caches / f"{_PREFIX}{digest}", caches / "kernels.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError:
        with _passing(f"podstream-{_PREFIX}{os.getpid()}-{digest}") as passing:
            _use(passing)
            yield
        return
    with file_lock(lock):
        for old in set(caches.glob(f"{_PREFIX}*")) - {folder}:
            shutil.rmtree(old, ignore_errors=True)
        if not _is_as_left(folder):
            shutil.rmtree(folder)
            folder.mkdir()
        _use(folder)
        yield
        _seal(folder)


@contextmanager
def _passing(name: str) -> Iterator[Path]:
    """The same folder each time: Numba makes it again when it compiles more of what it has begun to keep there."""
    folder = Path(tempfile.gettempdir()) / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)  # whoever is there already is not us
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _use(folder: Path) -> None:
    numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]  # read from the environment on import


def _is_as_left(folder: Path) -> bool:
    """A folder without a sum was left in the middle of something."""
    if not any(folder.iterdir()):
        return True
    if why := why_not_as_left(folder / _SUM, lambda: _sum_of(folder)):
        logger.warning("the kernels kept in %s are %s; compiling them anew.", folder, why)
    return not why


def _seal(folder: Path) -> None:
    """Whole or not at all."""
    partial = folder.with_suffix(".partial")
    try:
        partial.write_text(_sum_of(folder))
        partial.replace(folder / _SUM)
    except OSError as error:
        logger.warning("the kernels in %s cannot be sealed (%s); the next start compiles them.", folder, error)


def _sum_of(folder: Path) -> str:
    """Over names and bytes of all files but itself. Raises OSError for what is no file."""
    total = sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or path.name == _SUM:
            continue
        data = path.read_bytes()
        total.update(f"{path.relative_to(folder)} {len(data)}\0".encode() + data)
    return total.hexdigest()


def _digest(sources: Iterable[Path]) -> str:
    texts = (path.read_bytes() for path in sorted(sources))
    return sha256(b"\0".join(texts)).hexdigest()[:16]
