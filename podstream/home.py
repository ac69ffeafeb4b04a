"""Where podstream keeps things on this machine. The one module that reads the environment."""

import os
from collections.abc import Mapping
from pathlib import Path


def home() -> Path:
    """`$PODSTREAM_HOME`, else `podstream` in the user's cache folder. May not exist yet."""
    if chosen := os.environ.get("PODSTREAM_HOME"):
        return Path(chosen).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches).expanduser().absolute() / "podstream"


def environment() -> Mapping[str, str]:
    """What programs that podstream starts inherit."""
    return dict(os.environ)
