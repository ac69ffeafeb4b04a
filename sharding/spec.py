"""MeshSpec: which axes a mesh has and how long they are. Plain data, imports no JAX."""

import math
import re
from dataclasses import dataclass

from model.errors import PodstreamError

AXES = ("data", "tensor")


class MeshError(PodstreamError):
    """A mesh is misspelt, or the devices or the model do not fit it."""


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """Axis lengths in the order of `AXES`; 1 where an axis is not used."""

    data: int = 1
    tensor: int = 1

    @classmethod
    def parse(cls, text: str) -> "MeshSpec":
        """Read `data=1,tensor=4`. Raises MeshError naming the part that is wrong."""
        sizes: dict[str, int] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            match = re.fullmatch(r"([a-z]+)=([1-9]\d*)", part)
            if not match or match[1] not in AXES:
                raise MeshError(f"mesh: {part!r} is not understood; write it like data=1,tensor=4.")
            if match[1] in sizes:
                raise MeshError(f"mesh: axis {match[1]} is given twice in {text!r}.")
            sizes[match[1]] = int(match[2])
        spec = cls(**sizes)
        if spec.data > 1:
            raise MeshError(
                f"mesh: data={spec.data} within one replica is not supported yet; start {spec.data} replicas instead."
            )
        return spec

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.data, self.tensor)

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in zip(AXES, self.shape, strict=True))
