"""A gateway in front of a replica with a fake engine; the replica is a real server in this process.

Tests that only ask share one service per file: `shared`, and `http` or `shared_gateway` before it. Those that change
it, break it or count what it has done take one of their own: `engine`, `replica`, and `own_http` or `gateway`.
"""

import pytest

from tests.fakes import FakeEngineLoop
from tests.services import running_app, running_gateway, running_replica


@pytest.fixture(scope="module")
def service():
    """What replicas of a file's tests have beside an engine: `card`, `config`."""
    return {}


@pytest.fixture(scope="module")
async def shared(service):
    async with running_replica(**service) as running:
        yield running


@pytest.fixture(scope="module")
async def http(shared):
    """A client of the app itself, without a socket between: quicker, but streams arrive in one piece."""
    async with running_app(shared.address) as client:
        yield client


@pytest.fixture(scope="module")
async def shared_gateway(shared):
    async with running_gateway(shared.address) as running:
        yield running


@pytest.fixture
def engine():
    return FakeEngineLoop()


@pytest.fixture
async def replica(engine, service):
    async with running_replica(engine, **service) as running:
        yield running


@pytest.fixture
async def gateway(replica):
    async with running_gateway(replica.address) as running:
        yield running


@pytest.fixture
async def own_http(replica):
    async with running_app(replica.address) as client:
        yield client
