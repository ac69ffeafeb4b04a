"""Where Numba keeps compiled kernels: a folder for each state of their sources.

Numba compares the time of one file, that of the function it is asked for, and would run what an older version of the
other files compiled to.
"""

import shutil
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import numba

_PREFIX = "kernels-"


def keep_kernels(package: Path, sources: Iterable[Path]) -> None:
    """Have kernels that are made from now on kept in `package`'s `__pycache__`, apart from those of other sources.

    To be called before their modules are imported. Where the folder is read-only, Numba finds a place of its own.
    """
    caches = package / "__pycache__"
    folder = caches / f"{_PREFIX}{_digest(sources)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    for old in set(caches.glob(f"{_PREFIX}*")) - {folder}:
        shutil.rmtree(old, ignore_errors=True)
    numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]  # read from the environment on import


def _digest(sources: Iterable[Path]) -> str:
    texts = (path.read_bytes() for path in sorted(sources))
    return sha256(b"\0".join(texts)).hexdigest()[:16]
