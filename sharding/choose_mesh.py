"""Which meshes a model can be served on, which of them is nearest to one that cannot, and which suits it best."""

from collections.abc import Iterator
from itertools import product
from math import log2

from model.config import ModelConfig
from sharding.rules import choose_rules
from sharding.spec import AUTO, MeshError, MeshSpec


def choose_spec(text: str, config: ModelConfig, num_devices: int, num_slots: int) -> MeshSpec:
    """What `--mesh` says, or with `auto` the best for all devices: as much as possible is split over experts and
    tensors, and rows over the rest.

    Raises MeshError with the reason and the nearest mesh that works.
    """
    if text == AUTO:
        return min(
            (spec for spec in _specs(num_devices) if problem(config, spec, num_slots) is None),
            key=lambda spec: _cost(config, spec),
        )
    spec = MeshSpec.parse(text)
    check_spec(spec, config, num_slots)
    return spec


def check_spec(spec: MeshSpec, config: ModelConfig, num_slots: int) -> None:
    """Raises MeshError with the reason and the nearest mesh that works."""
    if (reason := problem(config, spec, num_slots)) is not None:
        near = nearest(config, spec, num_slots)
        raise MeshError(f"mesh {spec}: {reason}; the nearest that works is {near}.")


def problem(config: ModelConfig, spec: MeshSpec, num_slots: int) -> str | None:
    """Why the model cannot be served on this mesh; None if it can."""
    if num_slots % spec.data:
        return f"{num_slots} slots cannot be shared out evenly over data={spec.data}"
    if config.num_layers % spec.stage:
        return f"{config.num_layers} layers cannot be shared out evenly over stage={spec.stage}"
    if spec.expert > 1 and not config.num_experts:
        return f"the model has no experts to lie on expert={spec.expert}"
    if config.num_experts % spec.expert:
        return f"{config.num_experts} experts cannot be shared out evenly over expert={spec.expert}"
    if spec.tensor > 1 and not any("tensor" in group for group in choose_rules(config, spec).mesh_axes.values()):
        return f"nothing of the model can be split over tensor={spec.tensor}"
    return None


def nearest(config: ModelConfig, spec: MeshSpec, num_slots: int) -> MeshSpec:
    """The mesh of at most as many devices that works and differs least; of those, that of the most devices."""
    most = spec.num_devices
    working = (
        near
        for data, stage, expert in product(
            _divisors(num_slots, most), _divisors(config.num_layers, most), _divisors(config.num_experts or 1, most)
        )
        for tensor in range(1, most // (data * stage * expert) + 1)
        if problem(config, near := MeshSpec(data, stage, expert, tensor), num_slots) is None
    )
    return min(working, key=lambda near: (_distance(near, spec), -near.num_devices, near.shape))


def _divisors(size: int, most: int) -> list[int]:
    return [number for number in range(1, min(size, most) + 1) if size % number == 0]


def _distance(a: MeshSpec, b: MeshSpec) -> float:
    return sum(abs(log2(x / y)) for x, y in zip(a.shape, b.shape, strict=True))


def _specs(num_devices: int) -> Iterator[MeshSpec]:
    """All meshes of so many devices."""
    divisors = _divisors(num_devices, num_devices)
    for data, stage, expert in product(divisors, divisors, divisors):
        tensor, rest = divmod(num_devices, data * stage * expert)
        if tensor and not rest:
            yield MeshSpec(data, stage, expert, tensor)


def _cost(config: ModelConfig, spec: MeshSpec) -> tuple[int, ...]:
    """Fewer devices that repeat each other's weights first; then fewer copies of KV heads, then wider experts."""
    rules = choose_rules(config, spec)
    unsplit = sum(spec.tensor > 1 and "tensor" not in rules.mesh_axes[axis] for axis in ("heads", "mlp", "vocab"))
    return unsplit, spec.data * spec.stage, spec.stage, rules.kv_copies, -spec.expert
