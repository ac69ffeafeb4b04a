"""Traffic: what one call of a compiled program moves, to and from HBM and between devices.

Counted from XLA's text: an array that lies in HBM costs its bytes whenever an operation reads or writes it. Bodies of
loops count as often as they run. Of a branch the cheapest way counts: a plain greedy step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod

from tpu_configs.hlo import Array, Computation, Hlo, Instruction

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_FREE = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "partition-id", "replica-id",
         "copy-done", "async-done", "async-update", "opt-barrier", "iota", "optimization-barrier", "call-done",
         *(f"{name}-done" for name in COLLECTIVES), "slice-done", "dynamic-slice-done"}  # fmt: skip
_FREE_CALLS = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "PrepareAsyncCall", "Sharding")
_CALLS = ("call", "call-start", "async-start")
OF_ALL_LAYERS = 5
_PICKS = ("dynamic-slice", "slice", "gather")  # read as much as they give

Trips = Callable[[Instruction], int]
"""How often a loop runs."""


@dataclass(slots=True)
class Traffic:
    """Of one device."""

    hbm_bytes: float = 0.0
    collectives: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By kind: how many, and the bytes of what they give."""
    kernel_calls: int = 0
    top: dict[str, float] = field(default_factory=dict)
    """HBM bytes by where they are from in the traced program."""

    def add(self, other: "Traffic", times: int = 1) -> None:
        self.hbm_bytes += times * other.hbm_bytes
        self.kernel_calls += times * other.kernel_calls
        for kind, (count, size) in other.collectives.items():
            old_count, old_size = self.collectives.get(kind, (0, 0.0))
            self.collectives[kind] = old_count + times * count, old_size + times * size
        for name, size in other.top.items():
            self.top[name] = self.top.get(name, 0.0) + times * size


def step_traffic(hlo: Hlo, trips: Trips, kernel_bytes: Mapping[str, float]) -> Traffic:
    """`kernel_bytes` are those that one call of a kernel reads of what lies there for all layers, by its name: its
    operands do not tell."""

    @cache
    def of(name: str) -> Traffic:
        total = Traffic()
        computation = hlo.computations[name]
        for one in computation.instructions:
            total.add(of_instruction(computation, one))
        return total

    def of_instruction(computation: Computation, one: Instruction) -> Traffic:
        found = Traffic()
        kind = one.opcode.removesuffix("-start")
        if one.opcode == "while":
            found.add(of(one.called["body"]), trips(one))
        elif one.opcode == "conditional":
            found.add(min(map(of, one.branches), key=lambda branch: branch.hbm_bytes))
        elif one.opcode in _CALLS:
            found.add(of(next(iter(one.called.values()))))
        elif kind in COLLECTIVES:
            size = sum(array.num_bytes for array in one.arrays) / (2 if one.opcode.endswith("-start") else 1)
            found.collectives[kind] = 1, size
        if one.opcode == "fusion":
            for inner in _all_inside(hlo, one.called["calls"]):
                if inner.opcode.removesuffix("-start") in COLLECTIVES:
                    size = sum(array.num_bytes for array in inner.arrays)
                    found.add(Traffic(collectives={inner.opcode.removesuffix("-start"): (1, size)}))
        size = _hbm_bytes(hlo, computation, one)
        if _is_kernel(one):
            found.kernel_calls += 1
            size += kernel_bytes[kernel_name(one)]
        if size:
            found.hbm_bytes += size
            found.top[one.op_name or one.name] = size
        return found

    return of(hlo.entry)


def kernel_name(one: Instruction) -> str:
    """As `pallas_call` was told."""
    return one.name.split(".")[0]


def _is_kernel(one: Instruction) -> bool:
    return one.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in one.rest


def _all_inside(hlo: Hlo, name: str) -> list[Instruction]:
    found = []
    for one in hlo.computations[name].instructions:
        found.append(one)
        if one.opcode == "fusion":
            found += _all_inside(hlo, one.called["calls"])
    return found


def _hbm_bytes(hlo: Hlo, computation: Computation, one: Instruction) -> float:
    """What it reads and writes there itself, apart from computations that it runs."""
    if one.opcode in _FREE or one.opcode in ("while", "conditional", *_CALLS):
        return 0.0
    if one.opcode == "custom-call" and any(name in one.rest for name in _FREE_CALLS):
        return 0.0
    if _is_kernel(one):
        return _kernel_operand_bytes(computation, one)
    if one.opcode.endswith("-start") and one.opcode.removesuffix("-start") in ("copy", "slice", "dynamic-slice"):
        source = _arrays_of(computation, one.operands[0])
        moved = min((array.num_bytes for array in (*source, *one.arrays[:2]) if array.num_bytes > 4), default=0)
        return moved * sum(array.is_in_hbm for array in one.arrays[:2])
    return _read_bytes(hlo, computation, one) + _written_bytes(hlo, computation, one)


def _kernel_operand_bytes(computation: Computation, one: Instruction) -> float:
    """All but pages and experts of all layers: those have this many axes, or are written where they lie."""
    numbered = [pair for pair in enumerate(one.operands) if pair[0] not in one.written_in_place]
    read = [array for _, operand in numbered for array in _arrays_of(computation, operand)]
    own = [array for array in (*read, one.arrays[0]) if len(array.dims) < OF_ALL_LAYERS]
    return _in_hbm(own)


def _read_bytes(hlo: Hlo, computation: Computation, one: Instruction) -> float:
    total = 0.0
    for number, operand in enumerate(one.operands):
        arrays = _arrays_of(computation, operand)
        if one.opcode == "fusion":
            inner = hlo.computations[one.called["calls"]]
            share = _needed(hlo, inner)[inner.parameters[number].name]
        else:
            share = _share_read(hlo, one, number, arrays)
        total += share * _in_hbm(arrays)
    return total


def _needed(hlo: Hlo, computation: Computation) -> dict[str, float]:
    """Of each value inside a fusion the share that is computed. Nothing there lies in memory, so it is what others need
    of it: a slice of a converted weight converts the slice."""
    needed = dict.fromkeys(computation.by_name, 0.0)
    needed[computation.root.name] = 1.0
    for one in reversed(computation.instructions):
        for number, operand in enumerate(one.operands):
            if operand in needed and needed[one.name]:
                share = _share_read(hlo, one, number, _arrays_of(computation, operand))
                needed[operand] = min(1.0, needed[operand] + share * (needed[one.name] if _is_local(one) else 1.0))
    return needed


def _share_read(hlo: Hlo, user: Instruction, number: int, arrays: tuple[Array, ...]) -> float:
    """Of an operand, to give all of the result."""
    if user.opcode == "fusion":
        inner = hlo.computations[user.called["calls"]]
        return _needed(hlo, inner)[inner.parameters[number].name]
    if user.opcode in _PICKS and number == 0:
        return min(1.0, prod(user.arrays[0].dims) / max(1, prod(arrays[0].dims)))
    if user.opcode in ("dynamic-update-slice", "scatter") and number == 0:
        return 0.0  # updated where it lies
    return 1.0


def _is_local(one: Instruction) -> bool:
    """Whether a part of its result takes the same part of its operands."""
    return one.opcode not in ("convolution", "dot", "reduce", "reduce-window", "sort", "scatter", "gather", "broadcast")


def _written_bytes(hlo: Hlo, computation: Computation, one: Instruction) -> float:
    if one.opcode == "fusion":
        inner = hlo.computations[one.called["calls"]]
        return _written_of(hlo, inner, inner.root, one.arrays)
    if one.opcode in ("dynamic-update-slice", "scatter"):
        return _in_hbm(_arrays_of(computation, one.operands[-1 if one.opcode == "scatter" else 1]))
    return _in_hbm(one.arrays)


def _written_of(hlo: Hlo, computation: Computation, root: Instruction, outside: tuple[Array, ...]) -> float:
    """`outside` says where a fusion's results lie."""
    if root.opcode == "tuple":
        parts = (computation.by_name[name] for name in root.operands)
        return sum(_written_of(hlo, computation, part, (place,)) for part, place in zip(parts, outside, strict=True))
    if not any(array.is_in_hbm for array in outside):
        return 0.0
    if root.opcode == "bitcast":
        return _written_of(hlo, computation, computation.by_name[root.operands[0]], outside)
    if root.opcode == "fusion":
        inner = hlo.computations[root.called["calls"]]
        return _written_of(hlo, inner, inner.root, outside)
    if root.opcode in ("dynamic-update-slice", "scatter"):
        update = computation.by_name[root.operands[-1 if root.opcode == "scatter" else 1]]
        return float(sum(array.num_bytes for array in update.arrays))
    return _in_hbm(outside)


def _arrays_of(computation: Computation, name: str) -> tuple[Array, ...]:
    return computation.by_name[name].arrays


def _in_hbm(arrays: "tuple[Array, ...] | list[Array]") -> float:
    return float(sum(array.num_bytes for array in arrays if array.is_in_hbm))


def link_bytes(collectives: Mapping[str, tuple[int, float]], devices: int) -> float:
    """Bytes that one device sends over a ring of so many."""
    share = (devices - 1) / devices
    factor = {"all-reduce": 2 * share, "all-to-all": share, "all-gather": share, "reduce-scatter": devices - 1}
    return sum(size * factor.get(kind, 1.0) for kind, (_, size) in collectives.items())
