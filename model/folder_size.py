"""How many bytes lie in a folder that someone else is writing to."""

from pathlib import Path


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`, 0 when it does not exist; links are not followed."""
    return sum(_file_bytes(path) for path in folder.rglob("*"))


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() and not path.is_symlink() else 0
    except FileNotFoundError:  # it was moved or removed meanwhile
        return 0
