"""Settings and fixtures for all tests.

What JAX reads as it starts must be set before it is imported.
"""

import gc
import os

from tests.flags import virtual_devices

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = virtual_devices(4)

from pathlib import Path, PurePath
from typing import Any

import pytest
from rich.console import Console
from xdist.scheduler import LoadScopeScheduling

from podstream.home import home
from podstream.importing import ensure_demo_model


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's checkpoint, fetched and converted once per machine. Only for tests marked e2e."""
    return ensure_demo_model(home(), Console(stderr=True))


OWN_SERVERS = ("test_gemma", "test_memory", "test_training_checkpoint")
LONG_FIRST = ("server", "engine", "e2e", "slow")  # groups and marks


def group_of(nodeid: str) -> str:
    """Tests of one group run in one process: those that share the real server, and those that share compiled programs.
    The others go by file."""
    path = PurePath(nodeid.split("::")[0])
    if path.parent.name == "e2e" and path.stem not in OWN_SERVERS:
        return "server"
    return "engine" if path.parent.name == "engine" else str(path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long first, so that two processes end together."""

    def turn(item: pytest.Item) -> int:
        names = group_of(item.nodeid), *(mark.name for mark in item.iter_markers())
        return min((LONG_FIRST.index(name) for name in names if name in LONG_FIRST), default=len(LONG_FIRST))

    items.sort(key=turn)


def pytest_collection_finish() -> None:
    """What is imported and collected stays to the end: the garbage collector need not look at it over and over."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


class GroupScheduling(LoadScopeScheduling):
    """The groups of tests over the processes, in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    return GroupScheduling(config, log)
