"""Make a JAX mesh from a MeshSpec."""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from sharding.spec import AXES, MeshError, MeshSpec


def make_mesh(spec: MeshSpec, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over the first devices. Raises MeshError when there are too few.

    The axis type is stated because JAX's default (Explicit) would ask for a sharding at every gather.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < spec.num_devices:
        raise MeshError(
            f"mesh {spec} needs {spec.num_devices} devices, this process has {len(devices)} ({devices[0].platform})."
        )
    auto = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(spec.shape, AXES, axis_types=auto, devices=devices[: spec.num_devices])
