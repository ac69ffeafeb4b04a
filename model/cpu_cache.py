"""Where Numba keeps compiled kernels: a folder for each state of their sources.

Numba compares the time of one file, that of the function it is asked for, and would run what an older version of the
other files compiled to. And two processes that save at once can take the same file for different code.
"""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import numba

from model.file_lock import file_lock

_PREFIX = "kernels-"


@contextmanager
def kept_kernels(package: Path, sources: Iterable[Path]) -> Iterator[None]:
    """Within, kernels are imported, compiled, and kept in `package`'s `__pycache__`, apart from those of other sources.
    By one process at a time: the next finds them made.

    Where the folder is read-only, Numba finds a place of its own.
    """
    caches = package / "__pycache__"
    folder, lock = caches / f"{_PREFIX}{_digest(sources)}", caches / "kernels.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError:
        yield
        return
    with file_lock(lock):
        for old in set(caches.glob(f"{_PREFIX}*")) - {folder}:
            shutil.rmtree(old, ignore_errors=True)
        numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]  # read from the environment on import
        yield


def _digest(sources: Iterable[Path]) -> str:
    texts = (path.read_bytes() for path in sorted(sources))
    return sha256(b"\0".join(texts)).hexdigest()[:16]
