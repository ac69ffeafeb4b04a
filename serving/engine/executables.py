"""Executables: compiled programs kept in a folder, so that the next start neither traces nor compiles them.

XLA's own cache saves compiling alone: to trace and lower a program takes several times as long as to read it. It is
used until the first of these programs, for what packs and places weights.
A program lies under a digest of all that it is made from: podstream's sources, the versions of what compiles it, the
devices, its description and its arguments. A change of any of them finds nothing and compiles anew.

A file is code that runs here: the folder must be as trustworthy as the checkpoint's.
"""

import dataclasses
import logging
import os
import pickle
from contextlib import nullcontext, suppress
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from threading import Lock
from types import FunctionType
from typing import Any
from uuid import uuid4

import jax
import llvmlite.binding
from etils import epath
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding

from serving.revision import digest, revision
from sharding.spec import HOST_DEVICES_FLAG

logger = logging.getLogger(__name__)

NUM_KEPT = 8
"""States of sources, versions and devices whose programs are kept."""
COMPILER_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64")
"""What JAX and its compilers read from the environment."""
_SUM_BYTES = 32


class Executables:
    """The programs of one folder; without one, everything is compiled."""

    def __init__(self, folder: str | None, mesh: Mesh, *, are_here: bool = True) -> None:
        """Of devices that are described only, which are not `are_here`, programs are kept and never taken: JAX can
        load them where they run."""
        self._devices = tuple(mesh.devices.flat)
        self._lowering, self._compiling = (Lock() if _is_tpu(mesh) else nullcontext() for _ in range(2))
        self._are_here = are_here
        self._folder: epath.Path | None = None
        if folder is not None:
            _turn_off_compile_cache()
            all_hosts = epath.Path(folder) / "programs" / _surroundings(self._devices)
            if not all_hosts.exists():
                _make_room(all_hosts)
            self._folder = all_hosts / _host() if jax.process_count() > 1 else all_hosts

    def compiled(self, jitted: Any, args: tuple[Any, ...], *described: object) -> jax.stages.Compiled:
        """`jitted.lower(*args).compile()`, or what it gave once. `args` are arrays or abstract ones; `described` is
        everything else that the program depends on."""
        if self._folder is None:
            return self._compile(jitted, args)
        leaves, treedef = jax.tree.flatten(args)
        about = (f"{leaf.shape}{leaf.dtype}{_place(leaf.sharding)}" for leaf in leaves)
        path = self._folder / digest(describe(described), str(treedef), *about)
        program = _load(path, self._devices) if self._are_here else None
        if program is None:
            program = self._compile(jitted, args)
            _save(path, program)
        return program

    def _compile(self, jitted: Any, args: tuple[Any, ...]) -> jax.stages.Compiled:
        """A TPU's compiler uses several cores by itself, and two programs at once end the process now and then (libtpu
        0.0.42.1: what it makes for SparseCores overflows a stack). So one is compiled there, while the next is lowered.
        """
        with self._lowering:
            lowered = jitted.lower(*args)
        with self._compiling:
            program: jax.stages.Compiled = lowered.compile()
        return program


def num_compile_threads(mesh: Mesh) -> int:
    """How many programs to ask for at once."""
    return 2 if _is_tpu(mesh) else os.cpu_count() or 1


def _is_tpu(mesh: Mesh) -> bool:
    return bool(mesh.devices.flat[0].platform == "tpu")


def describe(value: object) -> str:
    """A text that is the same in every process for values that make the same program."""
    if isinstance(value, Mesh):
        return f"Mesh{dict(value.shape)}"
    if dataclasses.is_dataclass(value):
        parts = [f"{field.name}={describe(getattr(value, field.name))}" for field in dataclasses.fields(value)]
        return f"{type(value).__name__}({','.join(parts)})"
    if isinstance(value, tuple):
        return f"({','.join(map(describe, value))})"
    if isinstance(value, FunctionType):  # its own text has an address
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, partial):
        return f"partial{describe((value.func, value.args, tuple(sorted(value.keywords.items()))))}"
    assert " at 0x" not in repr(value), f"{value!r} would be another one in the next process"
    return repr(value)


def _place(sharding: Any) -> str:
    """The same for an array and for one that is described, which do not say alike what memory they lie in."""
    return f"{dict(sharding.mesh.shape)}{sharding.spec}" if isinstance(sharding, NamedSharding) else str(sharding)


def _load(path: epath.Path, devices: tuple[jax.Device, ...]) -> jax.stages.Compiled | None:
    """None where there is no file, or one that is damaged: then it is written anew."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("cannot read the kept program %s (%s); compiling it.", path, error)
        return None
    body = data[_SUM_BYTES:]
    if sha256(body).digest() != data[:_SUM_BYTES]:
        logger.warning("the kept program %s is damaged; compiling it anew.", path)
        return None
    payload, in_tree, out_tree = pickle.loads(body)
    try:
        program: jax.stages.Compiled = serialize_executable.deserialize_and_load(
            payload, in_tree, out_tree, execution_devices=devices
        )
    except jax.errors.JaxRuntimeError as error:
        logger.warning("the kept program %s does not load here (%s); compiling it.", path, error)
        return None
    return program


def _save(path: epath.Path, program: jax.stages.Compiled) -> None:
    """Whole or not at all. What cannot be kept is compiled again at the next start, and that is said."""
    partial = path.parent / f"{path.name}.{uuid4().hex}"
    try:
        body = pickle.dumps(serialize_executable.serialize(program))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(sha256(body).digest() + body)
        if path.is_dir():  # nothing of ours
            path.rmtree()
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):  # where it could not be written it need not be there
            partial.unlink()
        logger.warning("cannot keep a compiled program in %s (%s); the next start compiles it again.", path, error)


def _turn_off_compile_cache() -> None:
    """A program that XLA's own cache gave back runs, but what is kept of it then lacks functions (jax 0.10, CPU). So
    from here on this process takes nothing from there."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX looks at the setting once


def _make_room(folder: epath.Path) -> None:
    """Programs of other sources, versions or devices are seldom wanted again."""
    try:
        others = sorted(folder.parent.iterdir(), key=lambda other: other.stat().mtime)
        for old in others[: max(len(others) + 1 - NUM_KEPT, 0)]:
            old.rmtree()
    except OSError:
        return  # nothing there yet, or another process makes room, too; what prevents saving is said then


def _host() -> str:
    """Of several, each keeps its own part of the programs."""
    return f"host-{jax.process_index()}-of-{jax.process_count()}"


def _flags(text: str) -> str:
    """Without how many devices a CPU pretends to have: `podstream serve` asks for them whatever the machine has, and
    those in use are told by themselves."""
    return " ".join(flag for flag in text.split() if not flag.startswith(HOST_DEVICES_FLAG))


def _surroundings(devices: tuple[jax.Device, ...]) -> str:
    """What all programs of a process depend on."""
    platform = devices[0].platform
    versions = (f"{name} {version(name)}" for name in ("jax", "jaxlib", "numpy"))
    # what is compiled ahead for TPUs that are not here must be found where they are
    compiler = f"libtpu {version('libtpu')}" if platform == "tpu" else devices[0].client.platform_version
    flags = (_flags(os.environ.get(name, "")) for name in COMPILER_FLAGS)
    cpu = llvmlite.binding.get_host_cpu_features().flatten() if platform == "cpu" else ""
    kinds = (f"{device.id}{device.device_kind}" for device in devices)
    return digest(revision(), *versions, compiler, *kinds, *flags, cpu)
