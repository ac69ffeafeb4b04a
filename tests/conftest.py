"""Settings and fixtures for all tests.

Four virtual CPU devices, so that sharded programs are real; XLA optimises little, because tests compile far more than
they compute. Both must be set before JAX is imported.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"


from pathlib import Path

import pytest
from rich.console import Console

from podstream.home import home
from podstream.importing import ensure_demo_model


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's checkpoint, fetched and converted once per machine. Only for tests marked e2e."""
    return ensure_demo_model(home(), Console(stderr=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In two processes: tests that share compiled programs or the CPU kernel stay together, the others go by file."""
    for item in items:
        is_engine = item.path.parent.name == "engine" or item.path.name == "test_cpu_attention.py"
        item.add_marker(pytest.mark.xdist_group("engine" if is_engine else str(item.path)))
