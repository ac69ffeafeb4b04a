"""Chip: what one TPU chip can do. `chips.toml` holds them and says where each figure is from."""

from collections.abc import Mapping
from dataclasses import dataclass

from serving.errors import ConfigError

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Chip:
    """Figures of one chip; see `chips.toml` for their meaning."""

    name: str
    title: str
    libtpu: str
    """What libtpu calls topologies of it."""
    devices: int
    hbm_gib: float
    hbm_gb_s: float
    bf16_tflops: float
    int8_tops: float
    ici_gb_s: float
    ici_links: int
    vmem_mib: int
    smem_mib: int
    chips_per_host: tuple[int, ...]
    sources: Mapping[str, str]
    price_per_hour: float = 0.0

    def __post_init__(self) -> None:
        for field in ("devices", "hbm_gib", "hbm_gb_s", "bf16_tflops", "ici_gb_s", "ici_links", "vmem_mib", "smem_mib"):
            if not getattr(self, field) > 0:
                raise ConfigError(f"chip {self.name}: {field} must be positive, got {getattr(self, field)}.")
        if self.price_per_hour < 0:
            raise ConfigError(f"chip {self.name}: price_per_hour must be 0 or more, got {self.price_per_hour}.")

    @property
    def device_hbm_bytes(self) -> int:
        """What one device's programs can use."""
        return int(self.hbm_gib * GIB / self.devices)

    @property
    def device_bytes_per_s(self) -> float:
        """Of one device's memory."""
        return self.hbm_gb_s * 1e9 / self.devices

    @property
    def device_flops(self) -> float:
        """Peak of bfloat16 products of one device, FLOP/s."""
        return self.bf16_tflops * 1e12 / self.devices
