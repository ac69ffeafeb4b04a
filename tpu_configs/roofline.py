"""Roofline: how fast a step can be, from the bytes and operations that it cannot do without. Never a measurement."""

from dataclasses import dataclass

from tpu_configs.chip import Chip
from tpu_configs.deployment import Deployment
from tpu_configs.sizes import BYTES, Sizes


@dataclass(frozen=True, slots=True)
class Assumptions:
    """How much of what a chip can do at most a step reaches."""

    bandwidth_share: float = 0.85
    """Of memory bandwidth; published for a decode step of 8 rows: 0.85 (README.md)."""
    compute_share: float = 0.5
    """Of the peak of products, in prefill."""
    hop_us: float = 1.0
    """From one chip to its neighbour, beside the time that the bytes take."""

    def lines(self) -> tuple[str, ...]:
        return (
            f"memory gives {self.bandwidth_share:.0%} of its bandwidth, products reach {self.compute_share:.0%} of "
            "their peak",
            f"devices that share a model pass partial sums around a ring: bytes / one link, and {self.hop_us:g} us "
            "for each hop",
            "the host keeps ahead: steps follow each other without a gap",
        )


ASSUMED = Assumptions()


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step on one device. Memory and products overlap, links do not."""

    memory_s: float
    compute_s: float
    links_s: float

    @property
    def total_s(self) -> float:
        return max(self.memory_s, self.compute_s) + self.links_s


def step_time(
    chip: Chip, hbm_bytes: float, flops: float, ring_bytes: float, hops: float, assumed: Assumptions = ASSUMED
) -> StepTime:
    """`ring_bytes` are those that one device sends, `hops` how often it waits for a neighbour."""
    return StepTime(
        hbm_bytes / (chip.device_bytes_per_s * assumed.bandwidth_share),
        flops / (chip.device_flops * assumed.compute_share),
        ring_bytes / (chip.ici_gb_s * 1e9) + hops * assumed.hop_us * 1e-6,
    )


def all_reduce_cost(num_bytes: float, devices: int) -> tuple[float, int]:
    """(bytes that one device sends, hops) for a sum of arrays of so many bytes over a ring, both ways at once."""
    return (devices - 1) / devices * num_bytes, devices - 1


def decode_step(deployment: Deployment, rows: int, context: float, assumed: Assumptions = ASSUMED) -> StepTime:
    """One token for each of `rows` sequences of `context` tokens: weights and live keys and values are read once, and
    each layer adds up what its devices found twice."""
    sizes, model = Sizes.of(deployment), deployment.model
    hbm_bytes = sizes.read_bytes(rows) + rows * sizes.kv_read_bytes(context)
    sent, hops = all_reduce_cost(rows * model.embed_dim * BYTES[sizes.dtype], deployment.mesh.tensor)
    sums = 2 * model.num_layers
    return step_time(deployment.slice.chip, hbm_bytes, sizes.flops(rows, context), sums * sent, sums * hops, assumed)


def prefill_seconds(deployment: Deployment, prompt: int, assumed: Assumptions = ASSUMED) -> float:
    """To compute a prompt, without the weights' reading, which decode pays for."""
    flops = Sizes.of(deployment).flops(prompt, prompt / 2)
    return flops / (deployment.slice.chip.device_flops * assumed.compute_share)
