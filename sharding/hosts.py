"""Several hosts, one mesh: the one module that knows `jax.distributed`, and makes arrays that no host has whole."""

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from sharding.spec import MeshError, MeshSpec


def connect(address: str, num_hosts: int, index: int, within_s: float) -> int:
    """Make the devices of all hosts one set, in which this is host `index`; returns how many there are. To be called
    before anything else of JAX, by all hosts at about the same time. `address` is where host 0 coordinates them.

    Raises MeshError when they do not find each other within `within_s`.
    """
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            address, num_hosts, index, cluster_detection_method="deactivate", initialization_timeout=int(within_s) + 1
        )
        multihost_utils.sync_global_devices("podstream")  # a first sum over all devices: their network works
    except RuntimeError as error:
        raise MeshError(f"the devices of {num_hosts} hosts cannot be connected at {address}: {error}.") from error
    return len(jax.devices())


def put_everywhere(value: NDArray[np.generic], sharding: NamedSharding) -> jax.Array:
    """`value`, which is the same on every host, as one array over the devices of all of them."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def check_hosts(spec: MeshSpec) -> None:
    """Raises MeshError where some host would have nothing to do: a mesh over several takes all their devices."""
    num_hosts, num_devices = jax.process_count(), len(jax.devices())
    if num_hosts > 1 and spec.num_devices != num_devices:
        raise MeshError(
            f"mesh {spec} takes {spec.num_devices} devices, but the {num_hosts} hosts have {num_devices} together; "
            "a mesh over several hosts takes all of them."
        )


def only_one_step_at_a_time(mesh: Mesh) -> bool:
    """Whether a step must end before the next one is dispatched: where several hosts have several CPU devices each, the
    collectives of two programs can wait for each other (jax 0.10, gloo)."""
    several = jax.process_count() > 1 and jax.local_device_count() > 1
    return bool(several and mesh.devices.flat[0].platform == "cpu")


def least(value: int) -> int:
    """The smallest of what all hosts say."""
    return int(np.min(multihost_utils.process_allgather(np.int32(value)))) if jax.process_count() > 1 else value
