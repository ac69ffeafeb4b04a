"""MeshSpec: which axes a mesh has and how long they are. Plain data, imports no JAX.

data      rows of a step; every device keeps all pages        expert    experts of a layer
stage     layers, one part after the other                    tensor    heads, MLP and vocabulary
"""

import math
import re
from dataclasses import dataclass

from model.errors import PodstreamError

AXES = ("data", "stage", "expert", "tensor")
AUTO = "auto"
HOST_DEVICES_FLAG = "--xla_force_host_platform_device_count"
"""Of `XLA_FLAGS`: how many devices the CPU is."""


class MeshError(PodstreamError):
    """A mesh is misspelt, or the devices or the model do not fit it."""


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """Axis lengths in the order of `AXES`; 1 where an axis is not used."""

    data: int = 1
    stage: int = 1
    expert: int = 1
    tensor: int = 1

    @classmethod
    def parse(cls, text: str) -> "MeshSpec":
        """Read `data=1,tensor=4`. Raises MeshError naming the part that is wrong."""
        sizes: dict[str, int] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            match = re.fullmatch(r"([a-z]+)=([1-9]\d*)", part)
            if not match or match[1] not in AXES:
                raise MeshError(
                    f"mesh: {part!r} is not understood; write it like data=2,tensor=4 with axes {', '.join(AXES)}, "
                    f"or {AUTO}."
                )
            if match[1] in sizes:
                raise MeshError(f"mesh: axis {match[1]} is given twice in {text!r}.")
            sizes[match[1]] = int(match[2])
        return cls(**sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.data, self.stage, self.expert, self.tensor)

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        """The axes that are used."""
        used = [f"{axis}={size}" for axis, size in zip(AXES, self.shape, strict=True) if size > 1]
        return ",".join(used) or "tensor=1"
