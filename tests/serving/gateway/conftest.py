"""A gateway in front of a replica with a fake engine; the replica is a real server in this process."""

import pytest

from tests.fakes import FakeEngineLoop
from tests.services import running_app, running_gateway, running_replica


@pytest.fixture
def engine():
    return FakeEngineLoop()


@pytest.fixture
async def replica(engine):
    async with running_replica(engine) as running:
        yield running


@pytest.fixture
async def gateway(replica):
    async with running_gateway(replica.address) as running:
        yield running


@pytest.fixture
async def http(replica):
    """A client of the app itself, without a socket between: quicker to set up, but streams arrive in one piece."""
    async with running_app(replica.address) as client:
        yield client
