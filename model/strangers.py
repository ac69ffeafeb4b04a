"""What people give that is no model here: each kind has its own sentence, with the way out."""

import json
import stat
from collections.abc import Iterable
from pathlib import Path

from etils import epath

from model.errors import CheckpointError

LFS = b"version https://git-lfs"
_HF = "save_pretrained(..., safe_serialization=True) of transformers writes"
_STRANGE = (
    (("pytorch_model*.bin", "*.bin", "*.pt", "*.pth"), f"PyTorch pickles, which can run code; {_HF} safetensors"),
    (("*.msgpack",), f"Flax's msgpack; load it with from_flax=True, then {_HF} safetensors"),
    (("*.h5",), f"TensorFlow's HDF5; load it with from_tf=True, then {_HF} safetensors"),
    (("*.onnx",), "ONNX graphs; give the model that they were exported from"),
    (("*.safetensors",), "safetensors under a name that is not read; "
     "call it model.safetensors, or name the files in model.safetensors.index.json"),
)  # fmt: skip
"""Kinds of weights by the names of their files, in the order in which they are looked for."""
_CONSOLIDATED = "consolidated.*"
_PARTS = (".safetensors", ".json", ".bin", ".pt", ".pth", ".msgpack", ".h5")


def refuse_pipes(path: epath.Path | Path) -> None:
    """Raises CheckpointError when `path`, or what lies in the folder `path`, is a pipe or a device: who opens one may
    wait for ever. In a bucket there are none."""
    if "://" in str(path):
        return
    for each in path.iterdir() if path.is_dir() else [path]:
        if _is_endless(each):
            raise CheckpointError(f"{each} is a pipe or a device, and no file that can be read to its end.")


def _is_endless(path: epath.Path | Path) -> bool:
    """Not asked of `path` itself: what etils calls a file is all that is no folder."""
    if "://" in str(path) or not (here := Path(path)).exists():
        return False
    mode = here.stat().st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def refuse_pointers(path: epath.Path | Path) -> None:
    """Raises CheckpointError when the file `path`, or a file in the folder `path`, is only Git LFS's pointer to one."""
    files = path.iterdir() if path.is_dir() else [path]
    pointers = sorted(file.name for file in files if _is_pointer(file))
    if pointers:
        raise CheckpointError(
            f"{path}: {', '.join(pointers[:3])} {'are' if len(pointers) > 1 else 'is'} a pointer of Git LFS, "
            "not the file itself; run `git lfs pull` there, or fetch it anew."
        )


def refuse_part(path: epath.Path) -> None:
    """Raises CheckpointError when the file `path` is one of a folder that makes a model together."""
    if path.suffix in _PARTS:
        raise CheckpointError(f"{path} is one file of a model; give the folder that it lies in, {path.parent}.")


def why_no_model(folder: epath.Path) -> str:
    """What is in the folder instead of weights that are read: one sentence."""
    names = sorted(child.name for child in folder.iterdir())
    if not names:
        return f"{folder} is empty."
    if "adapter_config.json" in names:
        return (
            f"{folder} is an adapter, which changes a model and is none; serve {_base_of(folder)} and give this "
            f"with --lora NAME={folder}."
        )
    if found := _matching(folder, [_CONSOLIDATED]):
        return (
            f"{folder} holds {found[0]}, the weights in their authors' own format, which is not read; "
            "fetch the safetensors of the same model, or convert it with transformers."
        )
    for patterns, what in _STRANGE:
        if found := _matching(folder, patterns):
            return f"{folder} holds {found[0]}, but no weights that are read: these are {what}."
    return f"{folder} holds no weights that are known: no Orbax checkpoint, no safetensors, no GGUF file."


def _matching(folder: epath.Path, patterns: Iterable[str]) -> list[str]:
    return [name for pattern in patterns for name in sorted(child.name for child in folder.glob(pattern))]


def _base_of(folder: epath.Path) -> str:
    try:
        base = json.loads((folder / "adapter_config.json").read_text()).get("base_model_name_or_path")
    except (ValueError, AttributeError, OSError):
        base = None  # this sentence does not depend on it
    return f"its base model {base}" if isinstance(base, str) and base else "its base model"


def _is_pointer(file: epath.Path | Path) -> bool:
    if not file.is_file() or _is_endless(file):
        return False
    with file.open("rb") as opened:
        return bool(opened.read(len(LFS)) == LFS)
