"""The folder of one running service, for its socket: gone when the service is, however that ended."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "podstream-run-"


@contextmanager
def run_folder() -> Iterator[Path]:
    """A private folder where this machine keeps temporary files. Those that services left which were killed are removed
    first: the kernel has let go of their lock."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError), _locked(left):  # somebody else's, or one in use
            shutil.rmtree(left)
    made = Path(tempfile.mkdtemp(prefix="podstream-new-"))
    with _locked(made):
        folder = made.rename(made.with_name(made.name.replace("podstream-new-", _PREFIX)))  # locked before it is found
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises BlockingIOError where another process has it, and OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
