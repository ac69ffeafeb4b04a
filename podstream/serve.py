"""`podstream serve`: a model, a socket, two processes and a supervisor, put together."""

import asyncio
import contextlib
import dataclasses
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from podstream.child import Program
from podstream.liveness import grpc_answers, http_answers
from podstream.options import gateway_arguments, replica_arguments
from podstream.run_folder import run_folder
from podstream.startup import Startup
from podstream.supervisor import Supervisor
from serving.config import UNIX_PREFIX, EngineConfig, GatewayConfig, ReplicaConfig, ServeConfig
from serving.errors import ConfigError
from serving.gateway.listener import base_url, listen
from serving.gateway.server_tools.config import read_server_tools
from sharding.spec import AUTO, HOST_DEVICES_FLAG, MeshError, MeshSpec

NO_TPU = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0", "TPU_ACCELERATOR_TYPE": "v5litepod-1"}
"""Without these libtpu, which is there for `podstream check`, complains of a machine without a TPU in five lines."""
TPU_DEVICES = ("accel*", "vfio/*")  # in /dev
MAX_SOCKET_PATH = 100  # bytes; the kernel's limit is 108, macOS has 104


def serve(
    engine: EngineConfig,
    gateway: GatewayConfig,
    env: Mapping[str, str],
    console: Console,
    demo_checkpoint: Callable[[], Path],
    num_processes: int = 1,
) -> None:
    """Run until a signal; an engine without a checkpoint gets the demo model. `num_processes` share the mesh, on CPUs.

    What can be wrong at once is checked first: fetching and loading take too long to find out later.
    """
    if engine.mesh != AUTO:
        _devices_each(MeshSpec.parse(engine.mesh), num_processes)
    read_server_tools(gateway.tools_file)
    with listen(gateway.host, gateway.port) as listener, run_folder() as folder:
        _must_exist(engine.checkpoint)
        checkpoint = engine.checkpoint or str(demo_checkpoint())
        config = join_config(dataclasses.replace(engine, checkpoint=checkpoint), gateway, folder, num_processes)
        asyncio.run(_supervise(config, listener, env, console))


def _must_exist(checkpoint: str | None) -> None:
    """On this machine; what a URL leads to is found out by the replica."""
    if checkpoint is None or "://" in checkpoint or (path := Path(checkpoint).absolute()).exists():
        return
    from model.sources import source_like  # brings the hub's client, for which no start should wait

    source = source_like(checkpoint)
    hint = f"; `podstream import {source} ./model` fetches one of this name" if source else ""
    raise ConfigError(f"there is no checkpoint at {path}{hint}.")


def join_config(engine: EngineConfig, gateway: GatewayConfig, folder: Path, num_processes: int = 1) -> ServeConfig:
    """Gateway and replica meet at a Unix socket in a private folder: no port to choose, no one else to listen. Several
    processes of a replica meet at free ports."""
    path = folder / "replica.sock"
    if len(str(path)) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"the folder for temporary files is too long for a socket: {path}; set TMPDIR to a short one."
        )
    address = f"{UNIX_PREFIX}{path}"
    coordinator = f"127.0.0.1:{_free_pair()}" if num_processes > 1 else None
    replica = ReplicaConfig(
        address, gateway.drain_s, gateway.log_format, gateway.otlp_traces, coordinator, num_processes
    )
    return ServeConfig(engine, replica, dataclasses.replace(gateway, replica=address))


async def _supervise(config: ServeConfig, listener: socket.socket, env: Mapping[str, str], console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    replica, *followers = replica_programs(config, env)
    supervisor = Supervisor(replica, gateway_program(config, listener, env), config.gateway.drain_s, say, followers)
    await supervisor.run(Startup(base_url(listener), console).until_ready())


def replica_programs(config: ServeConfig, env: Mapping[str, str]) -> list[Program]:
    """One, or the several processes of one; the first serves gRPC."""
    count = config.replica.num_processes
    env = replica_env(config.engine.mesh, env, count)
    programs = []
    for number in range(count):
        place = dataclasses.replace(config.replica, process_id=number)
        arguments = [*replica_arguments(config.engine, place), "--follow-parent"]
        name = f"replica's process {number}" if number else "replica"
        answers = None if number else grpc_answers(config.replica.address)  # the hosts of a slice watch each other
        programs.append(Program(name, [sys.executable, "-m", "podstream", *arguments], env, answers=answers))
    return programs


def gateway_program(config: ServeConfig, listener: socket.socket, env: Mapping[str, str]) -> Program:
    fd = listener.fileno()
    arguments = [*gateway_arguments(config.gateway), "--fd", str(fd), "--follow-parent"]
    return Program(
        "gateway",
        [sys.executable, "-m", "podstream", *arguments],
        env,
        pass_fds=[fd],
        answers=http_answers(base_url(listener)),
    )


def replica_env(mesh: str, env: Mapping[str, str], num_processes: int = 1) -> Mapping[str, str]:
    """A mesh wider than one needs as many virtual CPU devices; where there are real ones the flag changes nothing, and
    several processes on one machine cannot share them."""
    env = {**({} if has_tpu() else NO_TPU), **env}
    if num_processes > 1:
        env = {**env, "JAX_PLATFORMS": "cpu"}
    flags = env.get("XLA_FLAGS", "")
    devices = 1 if mesh == AUTO else _devices_each(MeshSpec.parse(mesh), num_processes)
    if devices == 1 or HOST_DEVICES_FLAG in flags:
        return env
    return {**env, "XLA_FLAGS": f"{flags} {HOST_DEVICES_FLAG}={devices}".strip()}


def has_tpu(dev: Path = Path("/dev")) -> bool:
    """As far as this machine's devices tell."""
    return any(True for pattern in TPU_DEVICES for _ in dev.glob(pattern))


def _devices_each(mesh: MeshSpec, num_processes: int) -> int:
    """Raises MeshError where the processes cannot have equally many."""
    devices, rest = divmod(mesh.num_devices, num_processes)
    if rest:
        raise MeshError(
            f"mesh {mesh} has {mesh.num_devices} devices, which {num_processes} processes cannot share out evenly; "
            f"for example --mesh tensor={num_processes} works."
        )
    return devices


def _free_pair() -> int:
    """A port of this machine that is free, like the one above it."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
                return port
