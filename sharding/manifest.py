"""Manifest: size and CRC-32C of every file of a checkpoint, so that one flipped byte is refused.

The array storage below Orbax carries no checksums: a flipped byte loads without an error and gives wrong numbers. The
manifest is written last, so it is also the mark that a checkpoint is complete.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import google_crc32c
from etils import epath

from model.errors import CheckpointError

NAME = "podstream_manifest.json"
FORMAT = 1
READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class FileSum:
    num_bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class Manifest:
    files: dict[str, FileSum]
    """By path relative to the checkpoint, with `/`."""
    source: str | None = None
    """Where the weights came from, for people."""

    @classmethod
    def of(cls, root: epath.Path, source: str | None = None) -> "Manifest":
        """Read every file below `root` once."""
        return cls({name: _sum(root / name) for name in _names(root) if name != NAME}, source)

    @classmethod
    def read(cls, root: epath.Path) -> "Manifest":
        """Raises CheckpointError when there is none, or it cannot be understood."""
        try:
            data = json.loads((root / NAME).read_text())
            if data["format"] != FORMAT:
                raise CheckpointError(f"{root / NAME} has format {data['format']!r}, this version reads {FORMAT}.")
            files = {name: FileSum(size, int(crc, 16)) for name, (size, crc) in data["files"].items()}
            return cls(files, data.get("source"))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{root} is incomplete: {NAME}, which is written last, is missing; remove it and import again."
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{root / NAME} is corrupt: {error}; import the model again.") from error

    def write(self, root: epath.Path) -> None:
        """A half-written manifest is no JSON, so it is refused like a missing one."""
        said = {} if self.source is None else {"source": self.source}
        (root / NAME).write_text(json.dumps({"format": FORMAT, **said, "files": self._rows()}, indent=1))

    def verify(self, root: epath.Path, share: tuple[int, int] = (0, 1)) -> None:
        """Read every listed file, or with `share` (i, n) the i-th of n parts of about equal size, since n hosts need
        not read all of them n times. Raises CheckpointError naming the first that is missing, cut or changed."""
        index, count = share
        by_size = sorted(self.files.items(), key=lambda item: (-item[1].num_bytes, item[0]))
        for name, expected in by_size[index::count]:
            path = root / name
            if not path.exists():
                raise CheckpointError(f"{root} is incomplete: {name} is missing; import or copy it again.")
            if (found := _sum(path)).num_bytes != expected.num_bytes:
                raise CheckpointError(
                    f"{path} has {found.num_bytes:,} bytes, expected {expected.num_bytes:,}; import or copy it again."
                )
            if found != expected:
                raise CheckpointError(
                    f"{path} is corrupt: its CRC-32C is {found.crc32c:08x}, expected {expected.crc32c:08x}; "
                    "import or copy it again."
                )

    def _rows(self) -> dict[str, Any]:
        return {name: [file.num_bytes, f"{file.crc32c:08x}"] for name, file in sorted(self.files.items())}


def _names(root: epath.Path, prefix: str = "") -> Iterator[str]:
    for path in (root / prefix).iterdir():
        name = f"{prefix}/{path.name}" if prefix else path.name
        if path.is_dir():
            yield from _names(root, name)
        else:
            yield name


def _sum(path: epath.Path) -> FileSum:
    num_bytes = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            num_bytes += len(chunk)
            crc = google_crc32c.extend(crc, chunk)
    return FileSum(num_bytes, crc)
