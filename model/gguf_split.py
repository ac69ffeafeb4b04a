"""A GGUF model in several files, as `llama-gguf-split` writes them: NAME-00001-of-00003.gguf and so on.

The first has all metadata and its own tensors, the others only tensors. Any of them, or their folder, means them all.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from model.errors import CheckpointError
from model.gguf_header import GgufHeader, GgufTensor

_COUNT, _NUMBER, _TENSORS = "split.count", "split.no", "split.tensors.count"
_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_BESIDE = ("mmproj", "imatrix")
"""Beginnings of names of files that lie beside a model: of its eyes, and of statistics."""


def model_name(path: Path) -> str:
    """What a file's name says of the model in it."""
    match = _NAME.fullmatch(path.name)
    return match["stem"] if match else path.stem


def gguf_in(folder: Path) -> Path | None:
    """The one GGUF model in a folder, by its first file; None if there is none.

    Raises CheckpointError when there are several.
    """
    files = sorted(path for path in folder.glob("*.gguf") if not path.name.startswith(_BESIDE))
    firsts = {model_name(path): path for path in reversed(files)}
    if len(firsts) > 1:
        names = ", ".join(path.name for path in sorted(firsts.values()))
        raise CheckpointError(f"{folder} holds {len(firsts)} GGUF models: {names}; give the file of one.")
    return next(iter(firsts.values()), None)


def read_whole_header(path: Path) -> GgufHeader:
    """The header of the model of which `path` is the file or one of the files.

    Raises what `GgufHeader.read` does, and CheckpointError when files are missing or do not belong together.
    """
    header = GgufHeader.read(path)
    count = header.fields.get(_COUNT, 1)
    if not isinstance(count, int) or count <= 1:
        return header
    headers = [header if part == path else GgufHeader.read(part) for part in _parts(path, count)]
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(headers):
        _check_part(path, part, number, count)
        if twice := tensors.keys() & part.tensors.keys():
            raise CheckpointError(f"{path}: tensor {min(twice)} is in two of the {count} files of the model.")
        tensors |= part.tensors
    _check_sum(path, headers[0].fields.get(_TENSORS), len(tensors), count)
    return replace(headers[0], tensors=tensors)


def _parts(path: Path, count: int) -> list[Path]:
    match = _NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{path} is one of {count} files of a model; the others are not known unless its name ends "
            f"in -00001-of-{count:05}.gguf, or whichever it is."
        )
    names = [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{path.parent}: {len(missing)} of the {count} files of {match['stem']} are missing: "
            f"{', '.join(missing[:3])}; fetch them into the same folder."
        )
    return [path.parent / name for name in names]


def _check_part(path: Path, header: GgufHeader, number: int, count: int) -> None:
    found = header.fields.get(_NUMBER), header.fields.get(_COUNT)
    if found != (number, count):
        raise CheckpointError(
            f"{path}: the file that is called number {number + 1} of {count} says that it is number "
            f"{_from_one(found[0])} of {found[1]}; fetch the files again."
        )


def _check_sum(path: Path, expected: Any, found: int, count: int) -> None:
    if expected is not None and expected != found:
        raise CheckpointError(
            f"{path}: the {count} files of the model hold {found:,} tensors, expected are {expected!r}; "
            "fetch them again."
        )


def _from_one(number: Any) -> Any:
    return number + 1 if isinstance(number, int) else number
