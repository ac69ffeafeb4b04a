"""The devices of a slice that is not here, as libtpu describes them: programs can be compiled for them, not run."""

import importlib.util
import os
from typing import Any

from serving.errors import ConfigError
from tpu_configs.slice import Slice

_SETTINGS = {  # so that libtpu neither looks for a TPU machine nor keeps a second process out
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_INIT_ARGS = "LIBTPU_INIT_ARGS"
_LAUNCH_BARRIER = "--xla_tpu_use_enhanced_launch_barrier"
"""JAX asks libtpu for it where there is a TPU. A program is kept for those who ask for the same."""


def has_libtpu() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def describe_devices(held: Slice) -> list[Any]:
    """`jax.Device`s of the slice. Raises ConfigError where there is no libtpu, or it does not know the topology."""
    if not has_libtpu():
        raise ConfigError(
            "the TPU compiler, libtpu, is not installed: pip install 'podstream[aot]' (Linux on x86-64, Python 3.11 to "
            "3.13); `podstream plan` works without it."
        )
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if _LAUNCH_BARRIER not in (asked := os.environ.get(_INIT_ARGS, "")):
        os.environ[_INIT_ARGS] = f"{asked} {_LAUNCH_BARRIER}=true".strip()
    import jax
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")
    name = f"{held.chip.libtpu}:{held.topology}"
    try:
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=name, chips_per_host_bounds=_on_axes(held.host_bounds, held.shape)
        )
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        raise ConfigError(f"slice {held.name}: libtpu does not know the topology {name}: {error}.") from error
    assert len(found.devices) == held.num_devices, f"{name} has {len(found.devices)} devices"
    return list(found.devices)


def _on_axes(bounds: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """A host's chips along three axes; no more than the slice has."""
    return tuple(min(bound, size) for bound, size in zip(bounds, (*shape, 1)[:3], strict=True))
