"""Finds the pytree of arrays at or below a path, of the newest step of a run, and refuses one that is not whole.

A run's folder holds one folder per step. A step that is being written has another name, or lacks the time of its
commit, or the marks that older steps have, or its processes' databases are not merged yet. To pass over it would serve
an older model than was asked for, so it is refused, and the sentence names the newest step that is whole.
"""

import json
import re
from dataclasses import dataclass

from etils import epath

from model.errors import CheckpointError

MAX_DEPTH = 3
OCDBT, TREE = "manifest.ocdbt", "_METADATA"
ARRAY_FILES = {"/.zarray": "zarr", "/zarr.json": "zarr3"}
_CHECKPOINT, _COMMITTED = "_CHECKPOINT_METADATA", "commit_success.txt"
_ITEMS = ("items", "default", "state", "params", "model", "pytree")
_STEP = re.compile(r"(?:\D*_)?(\d+)")
_UNFINISHED = ".orbax-checkpoint-tmp"
_OF_ONE_PROCESS = "ocdbt.process_"


class Incomplete(CheckpointError):
    """A checkpoint that is only half there."""


@dataclass(frozen=True, slots=True)
class _Step:
    number: int
    folder: epath.Path
    marks: frozenset[str]
    """What says that it is whole, of the files that Orbax's versions write."""


def find_pytree(path: epath.Path) -> epath.Path | None:
    """The folder of the pytree at or below `path`; None if there is none.

    Raises CheckpointError when it, or the newest step of a run, is not whole, with the path of the newest one that is.
    """
    try:
        found = _find(path, MAX_DEPTH)
        if found is not None:
            _check_whole(found.parent)
        elif _number(path.name) is not None and path.is_dir() and (_marks(path) or not any(path.iterdir())):
            raise Incomplete(f"{path} is not complete: it holds no arrays.")
    except Incomplete as error:
        raise CheckpointError(f"{str(error).rstrip('.')}{_way_out(path)}.") from error
    return found


def _way_out(path: epath.Path) -> str:
    """The newest whole step beside the step that `path` is or lies in."""
    step = path if _number(path.name) is not None else path.parent
    if _number(step.name) is None or not step.parent.is_dir():
        return ""
    beside = {child.name: child for child in step.parent.iterdir() if child != step}
    for other in _sorted_steps(beside):
        try:
            if _find(other.folder, MAX_DEPTH) is not None:
                return f"; the newest whole step beside it is {other.folder}"
        except CheckpointError:  # it is not whole either
            continue
    return ""


def is_ocdbt(root: epath.Path) -> bool:
    return (root / OCDBT).exists()


def _find(path: epath.Path, depth: int) -> epath.Path | None:
    if not path.is_dir():
        return None
    children = {child.name: child for child in path.iterdir()}  # a look at each would take long in a bucket
    _check_whole(path)
    _check_merged(path, children)
    if OCDBT in children or TREE in children or any(_is_array(child) for child in children.values()):
        return path
    if depth == 0:
        return None
    for name in _ITEMS:
        if name in children and (found := _find(children[name], depth - 1)):
            return found
    steps = _sorted_steps(children)
    return _newest(path, steps, depth - 1) if steps else None


def _newest(run: epath.Path, steps: list[_Step], depth: int) -> epath.Path:
    """The pytree of the first of the steps. Raises CheckpointError when that is not whole, naming the first that is."""
    reason = ""
    for index, step in enumerate(steps):
        try:
            found = _pytree(step, steps[index + 1 :], depth)
        except Incomplete as error:
            reason = reason or str(error).rstrip(".")
            continue
        if not reason:
            return found
        raise CheckpointError(
            f"{reason}; it is the newest step of {run}, the newest whole one is {step.folder}: give that."
        )
    raise CheckpointError(f"{reason}; no other step of {run} is whole.")


def _pytree(step: _Step, older: list[_Step], depth: int) -> epath.Path:
    found = _find(step.folder, depth)
    if found is None:
        raise Incomplete(f"{step.folder} is not complete: it holds no arrays.")
    usual = frozenset[str]().union(*(other.marks for other in older))
    if lacking := usual - step.marks:
        raise Incomplete(f"{step.folder} is not complete: it lacks {min(lacking)}, which older steps have.")
    return found


def _sorted_steps(children: dict[str, epath.Path]) -> list[_Step]:
    """The newest first; of the same number what is whole by its name."""
    numbered = ((number, child) for name, child in children.items() if (number := _number(name)) is not None)
    steps = [_Step(number, child, _marks(child)) for number, child in numbered if child.is_dir()]
    return sorted(steps, key=lambda step: (step.number, _UNFINISHED not in step.folder.name), reverse=True)


def _number(name: str) -> int | None:
    """Of the step whose folder has this name, finished or not."""
    match = _STEP.fullmatch(name.partition(_UNFINISHED)[0])
    return int(match[1]) if match else None


def _marks(folder: epath.Path) -> frozenset[str]:
    return frozenset(mark for mark in (_CHECKPOINT, _COMMITTED) if (folder / mark).exists())


def _is_array(path: epath.Path) -> bool:
    return any((path / name[1:]).exists() for name in ARRAY_FILES)


def _check_merged(folder: epath.Path, children: dict[str, epath.Path]) -> None:
    if folder.name.startswith(_OF_ONE_PROCESS):
        raise Incomplete(f"{folder} is what one process of a run wrote, give the folder that it lies in.")
    parts = [name for name in children if name.startswith(_OF_ONE_PROCESS)]
    if parts and OCDBT not in children:
        raise Incomplete(
            f"{folder} is not complete: the databases of its {len(parts)} processes were never merged into one "
            f"({OCDBT} is missing)."
        )


def _check_whole(folder: epath.Path) -> None:
    if _UNFINISHED in folder.name:
        raise Incomplete(f"{folder} is not complete: the run that wrote it did not finish.")
    try:
        metadata = json.loads((folder / _CHECKPOINT).read_text())
    except FileNotFoundError:
        return
    except (ValueError, OSError) as error:
        raise Incomplete(f"{folder / _CHECKPOINT} is corrupt: {error}; copy the checkpoint again.") from error
    if isinstance(metadata, dict) and metadata.get("commit_timestamp_nsecs", 0) is None:
        raise Incomplete(f"{folder} is not complete: {_CHECKPOINT} has no time of commit.")
