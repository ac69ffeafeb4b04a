"""Where podstream keeps things on this machine. The one module that reads the environment."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from serving.errors import ConfigError

COORDINATOR_PORT = 8476
"""Where the hosts of a LeaderWorkerSet meet, and JAX's coordinator one above."""


class Place(NamedTuple):
    """Where a process stands among those of its slice."""

    coordinator: str | None = None
    num_processes: int = 1
    process_id: int = 0


def place_in(env: Mapping[str, str]) -> Place:
    """What a LeaderWorkerSet tells its pods; alone outside of one. Raises ConfigError when it makes no sense."""
    leader, size, index = (env.get(f"LWS_{name}") for name in ("LEADER_ADDRESS", "GROUP_SIZE", "WORKER_INDEX"))
    if leader is None or size in (None, "1"):
        return Place()
    try:
        return Place(f"{leader}:{COORDINATOR_PORT}", int(size or ""), int(index or ""))
    except ValueError as error:
        raise ConfigError(
            f"LWS_GROUP_SIZE and LWS_WORKER_INDEX must be numbers beside LWS_LEADER_ADDRESS, got {size!r}, {index!r}."
        ) from error


def home() -> Path:
    """`$PODSTREAM_HOME`, else `podstream` in the user's cache folder. May not exist yet.

    Raises ConfigError for a user without a home folder.
    """
    try:
        if chosen := os.environ.get("PODSTREAM_HOME"):
            return Path(chosen).expanduser().absolute()
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(caches).expanduser().absolute() / "podstream"
    except RuntimeError as error:
        raise ConfigError(
            "this user has no home folder to keep things in; set PODSTREAM_HOME to a folder that can be written."
        ) from error


def environment() -> Mapping[str, str]:
    """What programs that podstream starts inherit."""
    return dict(os.environ)
