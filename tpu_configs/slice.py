"""Slice: chips that are rented together, and how they are arranged."""

import math
import re
from dataclasses import dataclass

from serving.errors import ConfigError
from tpu_configs.chip import Chip


@dataclass(frozen=True, slots=True)
class Slice:
    name: str
    chip: Chip
    topology: str
    """Chips along each axis, such as 4x4."""
    hosts: int

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", self.topology):
            raise ConfigError(f"slice {self.name}: topology reads like 4x4 or 2x2x1, got {self.topology!r}.")
        per_host, rest = divmod(self.num_chips, max(self.hosts, 1))
        if self.hosts < 1 or rest or per_host not in self.chip.chips_per_host:
            possible = [self.num_chips // n for n in self.chip.chips_per_host if self.num_chips % n == 0]
            raise ConfigError(
                f"slice {self.name}: topology {self.topology} has {self.num_chips} chips, which do not make "
                f"{self.hosts} hosts of {self.chip.title}; possible: {', '.join(map(str, possible)) or 'none'}."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(int, self.topology.split("x")))

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        return self.num_chips * self.chip.devices

    @property
    def host_bounds(self) -> tuple[int, ...]:
        """Chips of one host along each axis of three, as libtpu wants to know."""
        return {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}[self.num_chips // self.hosts]
