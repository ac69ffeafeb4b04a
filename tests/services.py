"""Starts the serving programs' insides in this process: a replica around a fake engine, and a gateway in front."""

import asyncio
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
from prometheus_client import CollectorRegistry

from serving.config import UNIX_PREFIX, EngineConfig, GatewayConfig
from serving.gateway.admission.admission import Admission
from serving.gateway.app import create_app
from serving.gateway.listener import base_url, listen
from serving.gateway.main import make_server
from serving.gateway.server_tools.config import NO_TOOLS
from serving.metrics import Metrics
from serving.replica.client import ReplicaClient
from serving.replica.guard import Guard
from serving.replica.proto.replica_pb2_grpc import add_ReplicaServicer_to_server
from serving.replica.served import ServedModel
from serving.replica.server import ReplicaService
from serving.replica.transport import SERVER_OPTIONS
from tests.fakes import FakeEngineLoop, fake_card

ENGINE_CONFIG = EngineConfig("nowhere", control_tokens=True)
"""The fake model repeats its prompt, so that a conversation makes it end by spelling its end token."""
NO_SET_UP = {"trust_env": False, "verify": False}
"""Of an httpx client: reading the certificates takes longer than most tests."""


async def until(condition, timeout_s=5.0):
    """Wait for a condition; fails the test when it does not come true."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - conditions of all kinds
            await asyncio.sleep(0.005)


@dataclass
class Replica:
    service: ReplicaService
    server: grpc.aio.Server
    engine: FakeEngineLoop
    address: str


@asynccontextmanager
async def running_replica(
    engine=None, *, card=None, config=ENGINE_CONFIG, load=True, address=None, profile_folder="/traces", secret=None
):
    """A replica on a Unix socket in a short folder, or at a free port of `address`, as in 127.0.0.1:0."""
    engine = engine or FakeEngineLoop()
    with tempfile.TemporaryDirectory(prefix="pod-") as folder:
        address = address or f"unix:{Path(folder) / 'replica.sock'}"
        service = ReplicaService(profile_folder=profile_folder)
        guard = Guard(secret, is_private=address.startswith(UNIX_PREFIX))
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(guard,))
        add_ReplicaServicer_to_server(service, server)
        port = server.add_insecure_port(address)
        address = f"{address[:-1]}{port}" if address.endswith(":0") else address
        await server.start()
        if load:
            service.serve(ServedModel.build(config, engine, card or fake_card()))
        try:
            yield Replica(service, server, engine, address)
        finally:
            await server.stop(0)
            await service.close()


@asynccontextmanager
async def running_client(address, *, ready=True, secret=None):
    client = ReplicaClient(address, secret)
    client.start()
    try:
        if ready:
            await until(lambda: client.ready)
        yield client
    finally:
        await client.close()


@dataclass
class Gateway:
    client: ReplicaClient
    admission: Admission
    http: httpx.AsyncClient
    url: str


@asynccontextmanager
async def running_app(address, *, ready=True, tools=NO_TOOLS, **config):
    """The gateway's app without a server."""
    async with running_client(address, ready=ready) as client:
        app = create_app(GatewayConfig(replica=address, **config), client, Metrics(CollectorRegistry()), tools=tools)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", **NO_SET_UP) as http:
            yield http
        await app.state.tool_caller.close()


@asynccontextmanager
async def running_gateway(address, *, ready=True, tools=NO_TOOLS, **config):
    """A real HTTP server on a free port, and a client for it."""
    settings = GatewayConfig(port=0, replica=address, **config)
    admission = Admission(settings.max_queued)
    listener = listen(settings.host, settings.port)
    url = base_url(listener)
    async with running_client(address, ready=ready) as client:
        server = make_server(settings, client, admission, tools)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=20, limits=limits, **NO_SET_UP) as http:
            yield Gateway(client, admission, http, url)
        await _stop(server, serving)


async def _stop(server, serving):
    """What uvicorn does at its end, but for the naps of 0.1 s in between."""
    serving.cancel()
    await asyncio.wait([serving])
    for listening in server.servers:
        listening.close()
    for connection in list(server.server_state.connections):
        connection.shutdown()
    if tasks := list(server.server_state.tasks):
        _, late = await asyncio.wait(tasks, timeout=1)
        assert not late, f"requests of a gateway that has ended go on: {late}"
    await server.app.state.tool_caller.close()
