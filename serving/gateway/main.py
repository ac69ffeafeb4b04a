"""The gateway process: HTTP in front of one replica; SIGTERM drains.

On SIGTERM, SIGINT or the parent's end: `/ready` says 503 and new requests get 503 at once (the port stays open, so that
probes and balancers see it), streams finish within `drain_s`, what is left then ends with an error event, exit 0.
Without a parent the port is let go of at once: a new service may be waiting for it.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from functools import partial

import uvicorn
import uvloop
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from serving import tracing
from serving.config import GatewayConfig
from serving.gateway.admission.admission import Admission
from serving.gateway.app import create_app
from serving.gateway.listener import BACKLOG, base_url
from serving.gateway.protocol import GatewayProtocol
from serving.gateway.server_tools.config import NO_TOOLS, ServerTools, read_server_tools
from serving.gateway.websocket import SocketProtocol
from serving.metrics import Metrics
from serving.process import StopRequest, configure_logging, give_back_large_blocks, spare_the_collector
from serving.replica.client import ReplicaClient
from serving.secret import Secret

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75  # longer than the idle time of usual balancers, else they reuse a connection that is being closed
LAST_EVENTS_S = 1.0  # time for the error events of cut streams to be written


def run(config: GatewayConfig, listener: socket.socket, *, follow_parent: bool = False) -> None:
    """Serve on `listener` until told to stop. Raises ConfigError for files that cannot be read."""
    configure_logging(config.log_format, quiet=follow_parent)
    give_back_large_blocks()
    if config.otlp_traces is not None:
        tracing.turn_on("podstream-gateway", config.otlp_traces)
    tools, secret = read_server_tools(config.tools_file), Secret.read(config.secret_file)
    uvloop.run(_serve(config, tools, secret, listener, follow_parent))


async def _serve(
    config: GatewayConfig, tools: ServerTools, secret: Secret | None, listener: socket.socket, follow_parent: bool
) -> None:
    stop = StopRequest()
    stop.listen()
    if follow_parent:
        stop.follow_parent(config.drain_s)
    replica = ReplicaClient(config.replica, secret)
    replica.start()
    admission = Admission(config.max_queued)
    server = make_server(config, replica, admission, tools)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    logger.info("listening on %s", base_url(listener))
    spare_the_collector()
    await stop.wait()
    if stop.is_orphan:
        for listening in server.servers:
            listening.close()
    await _drain(admission, replica, config.drain_s)
    server.should_exit = True
    await serving


async def _drain(admission: Admission, replica: ReplicaClient, drain_s: float) -> None:
    admission.drain()
    if not await admission.emptied(drain_s):
        logger.warning("%d streams did not finish within %g s and are cut", admission.num_in_flight, drain_s)
    await replica.close()
    await admission.emptied(LAST_EVENTS_S)


def make_server(
    config: GatewayConfig,
    replica: ReplicaClient,
    admission: Admission,
    tools: ServerTools = NO_TOOLS,
) -> uvicorn.Server:
    """An HTTP server around the app, to be run with `serve(sockets=[...])` until its `should_exit` is set."""
    app = create_app(config, replica, Metrics(CollectorRegistry()), admission, tools)
    settings = uvicorn.Config(
        app,
        http=GatewayProtocol,
        ws=partial(SocketProtocol, budget=app.state.body_budget),  # type: ignore[arg-type] # as a class is called
        ws_max_size=config.max_body_bytes,
        lifespan="off",
        access_log=False,
        log_config=None,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        server_header=False,
        proxy_headers=False,  # nothing here asks who the client is
    )
    return _Server(settings, app)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: draining comes first, and is ours."""

    def __init__(self, settings: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(settings)
        self.app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await self.app.state.tool_caller.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
