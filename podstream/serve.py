"""`podstream serve`: a model, a socket, two processes and a supervisor, put together."""

import asyncio
import dataclasses
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from podstream.child import Program
from podstream.options import gateway_arguments, replica_arguments
from podstream.startup import Startup
from podstream.supervisor import Supervisor
from serving.config import UNIX_PREFIX, EngineConfig, GatewayConfig, ReplicaConfig, ServeConfig
from serving.errors import ConfigError
from serving.gateway.listener import base_url, listen
from serving.gateway.server_tools.config import read_server_tools
from sharding.spec import AUTO, MeshSpec

HOST_DEVICES_FLAG = "--xla_force_host_platform_device_count"
MAX_SOCKET_PATH = 100  # bytes; the kernel's limit is 108, macOS has 104


def serve(
    engine: EngineConfig,
    gateway: GatewayConfig,
    env: Mapping[str, str],
    console: Console,
    demo_checkpoint: Callable[[], Path],
) -> None:
    """Run until a signal; an engine without a checkpoint gets the demo model.

    What can be wrong at once is checked first: fetching and loading take too long to find out later.
    """
    if engine.mesh != AUTO:
        MeshSpec.parse(engine.mesh)
    read_server_tools(gateway.tools_file)
    with listen(gateway.host, gateway.port) as listener, tempfile.TemporaryDirectory(prefix="podstream-") as folder:
        checkpoint = engine.checkpoint or str(demo_checkpoint())
        config = join_config(dataclasses.replace(engine, checkpoint=checkpoint), gateway, Path(folder))
        asyncio.run(_supervise(config, listener, env, console))


def join_config(engine: EngineConfig, gateway: GatewayConfig, folder: Path) -> ServeConfig:
    """Gateway and replica meet at a Unix socket in a private folder: no port to choose, no one else to listen."""
    path = folder / "replica.sock"
    if len(str(path)) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"the folder for temporary files is too long for a socket: {path}; set TMPDIR to a short one."
        )
    address = f"{UNIX_PREFIX}{path}"
    replica = ReplicaConfig(address, gateway.drain_s, gateway.log_format, gateway.otlp_traces)
    return ServeConfig(engine, replica, dataclasses.replace(gateway, replica=address))


async def _supervise(config: ServeConfig, listener: socket.socket, env: Mapping[str, str], console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    supervisor = Supervisor(
        replica_program(config, env), gateway_program(config, listener, env), config.gateway.drain_s, say
    )
    await supervisor.run(Startup(base_url(listener), console).until_ready())


def replica_program(config: ServeConfig, env: Mapping[str, str]) -> Program:
    arguments = [*replica_arguments(config.engine, config.replica), "--follow-parent"]
    return Program("replica", [sys.executable, "-m", "podstream", *arguments], replica_env(config.engine.mesh, env))


def gateway_program(config: ServeConfig, listener: socket.socket, env: Mapping[str, str]) -> Program:
    fd = listener.fileno()
    arguments = [*gateway_arguments(config.gateway), "--fd", str(fd), "--follow-parent"]
    return Program("gateway", [sys.executable, "-m", "podstream", *arguments], env, pass_fds=[fd])


def replica_env(mesh: str, env: Mapping[str, str]) -> Mapping[str, str]:
    """A mesh wider than one needs as many virtual CPU devices; where there are real ones the flag changes nothing."""
    flags = env.get("XLA_FLAGS", "")
    devices = 1 if mesh == AUTO else MeshSpec.parse(mesh).num_devices
    if devices == 1 or HOST_DEVICES_FLAG in flags:
        return env
    return {**env, "XLA_FLAGS": f"{flags} {HOST_DEVICES_FLAG}={devices}".strip()}
