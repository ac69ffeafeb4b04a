"""Fetches a model repository from the Hugging Face Hub: only the files that are read here, resumed where it stopped."""

import fnmatch
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError comes from its HTTP client
    GatedRepoError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # public, says its manual

from model.errors import SourceUnavailable
from model.folder_size import folder_bytes

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

POLL_S = 0.2
FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
    "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors",
)  # fmt: skip
OTHER_WEIGHTS = (".gguf", ".safetensors", ".bin", ".pth", ".pt", ".msgpack", ".h5", ".onnx")


def fetch_repository(
    name: str, revision: str | None, cache: Path, on_progress: Progress, *, endpoint: str | None = None
) -> Path:
    """The folder with the files of repository `name` (`org/name`) at `revision` (None: its main branch).

    `cache` keeps what was fetched, whole or not, for the next time. `endpoint` None is the library's own default.
    Raises SourceUnavailable when the repository, the revision or the network is not there.
    """
    try:
        commit, total = _commit_and_bytes(name, revision, endpoint)
        return _download(name, commit, cache, total, on_progress, endpoint)
    except GatedRepoError as error:
        raise SourceUnavailable(
            f"hf:{name} is gated; accept its licence there and log in with `hf auth login`."
        ) from error
    except RevisionNotFoundError as error:
        raise SourceUnavailable(f"hf:{name} has no revision {revision!r}.") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise SourceUnavailable(f"hf:{name} does not exist, or needs a log-in.") from error
    except (HTTPError, LocalEntryNotFoundError, OSError) as error:
        raise SourceUnavailable(
            f"hf:{name} could not be fetched ({type(error).__name__}); check the network and run the command again, "
            "what has arrived is kept."
        ) from error


def _commit_and_bytes(name: str, revision: str | None, endpoint: str | None) -> tuple[str, int]:
    """Asked first, so that a branch that moves meanwhile does not mix two versions."""
    info = HfApi(endpoint=endpoint).model_info(name, revision=revision, files_metadata=True)
    wanted = [file for file in info.siblings or [] if any(fnmatch.fnmatch(file.rfilename, glob) for glob in FILES)]
    if not wanted or info.sha is None:
        raise SourceUnavailable(f"hf:{name} holds none of the files that are read: {', '.join(FILES)}.")
    if not any(file.rfilename.endswith(".safetensors") for file in wanted):
        others = [file.rfilename for file in info.siblings or [] if file.rfilename.endswith(OTHER_WEIGHTS)]
        raise SourceUnavailable(
            f"hf:{name} holds no model.safetensors, whole or in parts, only {', '.join(others[:3]) or 'other files'}; "
            "a GGUF file can be downloaded by hand and given by its path."
        )
    return info.sha, sum(file.size or 0 for file in wanted)


def _download(name: str, commit: str, cache: Path, total: int, on_progress: Progress, endpoint: str | None) -> Path:
    """Its own bars are silenced; the bytes on disk are what counts."""
    disable_progress_bars()
    blobs = cache / f"models--{name.replace('/', '--')}" / "blobs"
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(
            snapshot_download, name, revision=commit, cache_dir=cache, allow_patterns=list(FILES), endpoint=endpoint
        )
        while not _is_done(fetching):
            on_progress(min(folder_bytes(blobs), total), total)
    on_progress(total, total)
    return Path(str(fetching.result()))


def _is_done(fetching: "Future[Any]") -> bool:
    try:
        fetching.exception(POLL_S)
    except NotYet:
        return False
    return True
