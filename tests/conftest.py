"""Settings and fixtures for all tests.

What JAX reads as it starts must be set before it is imported.
"""

import os

from tests.flags import virtual_devices

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = virtual_devices(4)

from pathlib import Path
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


ONE_SERVER = ("test_first_light", "test_answer_format", "test_readme", "test_server_tools", "test_traces", "test_lora")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process starts the shared server, which compiles, while the other runs what needs none."""

    def turn(item: pytest.Item) -> int:
        return 0 if item.path.stem in ONE_SERVER else 1 + ("server" in getattr(item, "fixturenames", ()))

    items.sort(key=turn)


class TogetherScheduling(LoadScopeScheduling):
    """In two processes: tests that share compiled programs or a server stay together, the others go by file. The slow
    ones compile their own."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0]
        if Path(path).stem in ONE_SERVER:
            return "server"
        shares = "/engine/" in path and not self.config.option.markexpr.startswith("slow")
        return "engine" if shares else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TogetherScheduling:
    return TogetherScheduling(config, log)
