"""The replica process: gRPC first, then the model, then ready; SIGTERM drains.

1. The server listens at once, so that everyone can see what is being loaded.
2. A thread loads the model (importing JAX, reading weights, compiling); the event loop stays free.
3. SIGTERM, SIGINT or the parent's end: refuse new requests, let running ones finish within `drain_s`, exit 0.
4. An engine that fails takes the process with it (exit 1): a supervisor starts a fresh one.
5. Of several hosts this is the first (`serving.hosts`): it waits for the others before it loads, and ends with them.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from model.card import ModelCard
from model.errors import PodstreamError
from serving import tracing
from serving.config import UNIX_PREFIX, EngineConfig, ReplicaConfig
from serving.engine.api import EngineLoop
from serving.errors import ConfigError, EngineFailed
from serving.hosts import fingerprint
from serving.hosts.join import gather
from serving.hosts.leader import Hosts
from serving.process import StopRequest, configure_logging, leave, spare_the_collector
from serving.replica.guard import Guard
from serving.replica.proto.replica_pb2_grpc import add_ReplicaServicer_to_server
from serving.replica.served import ServedModel
from serving.replica.server import POLL_S, ReplicaService
from serving.replica.transport import SERVER_OPTIONS
from serving.secret import Secret

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]
BuildEngine = Callable[[EngineConfig, Progress, Hosts | None], tuple[EngineLoop, ModelCard]]

SERVICE_NAME = "podstream.replica.v1.Replica"
LAST_WORDS_S = 0.5  # time for the last status to reach the gateways


def run(engine: EngineConfig, replica: ReplicaConfig, build: BuildEngine, *, follow_parent: bool = False) -> None:
    """Serve until told to stop. Raises PodstreamError when the model cannot be loaded or the engine fails."""
    configure_logging(replica.log_format, quiet=follow_parent)
    if replica.otlp_traces is not None:
        tracing.turn_on("podstream-replica", replica.otlp_traces)
    several = replica.num_processes > 1
    try:
        has_waiting_threads = uvloop.run(_serve(engine, replica, build, follow_parent))
    except Exception as error:
        if not several and not isinstance(error, EngineLost):
            raise
        if not isinstance(error, PodstreamError):
            logger.exception("the replica cannot go on")
        leave(1, str(error))  # at once: JAX would wait for hosts that may be gone
    if several or has_waiting_threads:
        tracing.flush()
        leave(0, "")


class EngineLost(EngineFailed):
    """Its thread does not come back from a step."""


async def _serve(engine: EngineConfig, replica: ReplicaConfig, build: BuildEngine, follow_parent: bool) -> bool:
    return await ReplicaProcess(engine, replica, build).serve(follow_parent)


class ReplicaProcess:
    """Wires one service, one server, one loading thread. Created on the event loop that serves."""

    def __init__(self, engine: EngineConfig, replica: ReplicaConfig, build: BuildEngine) -> None:
        self._engine = engine
        self._replica = replica
        self._build = build
        self._service = ReplicaService(engine.stuck_s, engine.profile_folder)
        self._hosts: Hosts | None = None
        self._health = health_aio.HealthServicer()
        guard = Guard(Secret.read(replica.secret_file), is_private=replica.address.startswith(UNIX_PREFIX))
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(guard,))

    async def serve(self, follow_parent: bool) -> bool:
        """Returns whether there are threads that nothing can interrupt, and for which Python would wait."""
        stop = StopRequest()
        stop.listen()
        if follow_parent:
            stop.follow_parent(self._replica.drain_s)
        await self._listen()
        thread, loaded = self._start_loading()
        try:
            await self._live(asyncio.ensure_future(stop.wait()), loaded)
        finally:
            await self._server.stop(LAST_WORDS_S)
            await self._service.close()
        return thread.is_alive() or self._service.has_waiting_threads

    async def _live(self, stopped: asyncio.Future[None], loaded: asyncio.Future[ServedModel]) -> None:
        losing = asyncio.ensure_future(self._until_lost(loaded))
        either: set[asyncio.Future[Any]] = {stopped, loaded}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        losing.cancel()
        if loaded.done():
            await self._become_ready(loaded)
            await self._until_stopped(stopped)
        elif self._hosts is not None:
            self._hosts.stop()
        await self._drain()

    async def _until_lost(self, loaded: asyncio.Future[ServedModel]) -> None:
        """A host that is lost while all of them load: the loading thread may wait for it for ever."""
        while self._hosts is None or not self._hosts.failure:  # noqa: ASYNC110 - both are set by other threads
            await asyncio.sleep(POLL_S)
        _settle(loaded, None, EngineFailed(self._hosts.failure))

    async def _listen(self) -> None:
        add_ReplicaServicer_to_server(self._service, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self._set_health(serving=False)
        try:
            self._server.add_insecure_port(self._replica.address)
        except RuntimeError as error:
            raise ConfigError(
                f"the replica cannot listen at {self._replica.address}: in use or not allowed; choose another address."
            ) from error
        await self._server.start()

    def _start_loading(self) -> tuple[threading.Thread, asyncio.Future[ServedModel]]:
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[ServedModel] = loop.create_future()

        def report(detail: str) -> None:
            loop.call_soon_threadsafe(self._service.report, detail)

        def load() -> None:
            try:
                if self._replica.num_processes > 1:
                    self._hosts = gather(self._replica, fingerprint.of_config(self._engine), report)
                served = ServedModel.build(self._engine, *self._build(self._engine, report, self._hosts))
                spare_the_collector()
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the future
                if self._hosts is not None:
                    self._hosts.fail(str(error))
                loop.call_soon_threadsafe(_settle, loaded, None, error)
            else:
                loop.call_soon_threadsafe(_settle, loaded, served, None)

        thread = threading.Thread(target=load, name="load-model", daemon=True)
        thread.start()
        return thread, loaded

    async def _become_ready(self, loaded: asyncio.Future[ServedModel]) -> None:
        try:
            self._service.serve(loaded.result())
        except Exception as error:
            self._service.fail(str(error))
            raise
        await self._set_health(serving=True)
        logger.info("ready: %s at %s", self._service.status.model, self._replica.address)

    async def _until_stopped(self, stopped: asyncio.Future[None]) -> None:
        failed = asyncio.ensure_future(self._service.engine_failed())
        await asyncio.wait({stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
        await self._set_health(serving=False)
        if failed.done():
            self._service.fail(self._service.engine_failure)
            if self._hosts is not None:
                raise EngineFailed(f"the hosts cannot go on and the replica ends: {self._service.engine_failure}.")
            if self._service.has_waiting_threads:
                raise EngineLost(f"{self._service.engine_failure}: the replica ends.")
            raise EngineFailed("the engine failed and the replica ends; the lines above say why.")
        failed.cancel()

    async def _drain(self) -> None:
        self._service.drain()
        try:
            await asyncio.wait_for(self._service.drained(), self._replica.drain_s)
        except TimeoutError:
            logger.warning("%g s were not enough to finish all answers; the rest is cut", self._replica.drain_s)

    async def _set_health(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)


def _settle(loaded: asyncio.Future[ServedModel], served: ServedModel | None, error: BaseException | None) -> None:
    """Runs on the event loop; the future may be cancelled or its loop about to end."""
    if loaded.done():
        return
    if error is not None:
        loaded.set_exception(error)
    elif served is not None:
        loaded.set_result(served)
