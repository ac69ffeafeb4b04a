"""Hlo: a compiled program, read from XLA's text. Enough to follow who reads what, and how often.

A line is `%name = shape opcode(%operand, ...), attribute=...`; computations are blocks of lines, one of them ENTRY.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

_NAME = re.compile(r"%([\w.\-]+)")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_LINE = re.compile(r"^\s*(ROOT )?%([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")
_CALLED = re.compile(r"\b(calls|body|condition|to_apply|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ALIASES = re.compile(r"\boutput_to_operand_aliasing=\{((?:\{[\d, ]*\}: \(\d+, \{[\d, ]*\}\)(?:, )?)*)\}")
_SPACE = re.compile(r"S\((\d+)\)")
_TILE = re.compile(r"T\(([\d,]+)\)")
BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s32": 32,
        "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "f8e4m3fn": 8, "f8e5m2": 8}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a shape, which may be a tuple of several."""

    dtype: str
    dims: tuple[int, ...]
    layout: str
    """As XLA writes it: dimensions from minor to major, tiles, memory space."""

    @property
    def is_in_hbm(self) -> bool:
        """Space 0, which is not written, is HBM; 1 is VMEM."""
        return _SPACE.search(self.layout) is None

    @property
    def num_bytes(self) -> int:
        """As it lies in memory, with what fills up its tiles."""
        return prod(self._padded()) * BITS.get(self.dtype, 0) // 8

    def _padded(self) -> tuple[int, ...]:
        order = self.layout.split(":")[0]
        tile = _TILE.search(self.layout)
        if not order or tile is None or not self.dims:
            return self.dims
        sizes = tuple(map(int, tile[1].split(",")))
        padded = list(self.dims)
        for size, axis in zip(reversed(sizes), map(int, order.split(",")), strict=False):
            padded[axis] = -(-padded[axis] // size) * size
        return tuple(padded)


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    opcode: str
    arrays: tuple[Array, ...]
    """Of its result."""
    operands: tuple[str, ...]
    rest: str
    """Its attributes, as text."""
    is_root: bool

    @property
    def called(self) -> Mapping[str, str]:
        """Computations by the attribute that names them, except those of branches."""
        return dict(_CALLED.findall(self.rest))

    @property
    def branches(self) -> tuple[str, ...]:
        """Of a conditional."""
        found = _BRANCHES.search(self.rest)
        if found:
            return tuple(_NAME.findall(found[1]))
        return tuple(self.called[key] for key in ("true_computation", "false_computation") if key in self.called)

    @property
    def known_trips(self) -> int | None:
        """Of a loop whose length XLA knows."""
        found = _TRIPS.search(self.rest)
        return int(found[1]) if found else None

    @property
    def written_in_place(self) -> frozenset[int]:
        """Of a custom call the operands that its results take the place of."""
        found = _ALIASES.search(self.rest)
        return frozenset(map(int, re.findall(r"\((\d+),", found[1]))) if found else frozenset()

    @property
    def op_name(self) -> str:
        """Where in the traced program it is from."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


@dataclass(frozen=True)
class Computation:
    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {one.name: one for one in self.instructions}

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        return {int(one.operands[0]): one for one in self.instructions if one.opcode == "parameter"}

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        found: dict[str, list[Instruction]] = {}
        for one in self.instructions:
            for operand in dict.fromkeys(one.operands):
                found.setdefault(operand, []).append(one)
        return {name: tuple(users) for name, users in found.items()}

    @property
    def root(self) -> Instruction:
        return next(one for one in self.instructions if one.is_root)


@dataclass(frozen=True)
class Hlo:
    computations: Mapping[str, Computation]
    entry: str
    header: str
    """The module's own line: which outputs lie in the memory of which inputs, among others."""

    @classmethod
    def parse(cls, text: str) -> "Hlo":
        computations, entry, name, lines = {}, "", "", list[Instruction]()
        header, _, body = text.partition("\n")
        for line in body.splitlines():
            if found := _HEADER.match(line):
                name, lines = found[2], []
                entry = name if found[1] else entry
            elif line.startswith("}"):
                computations[name] = Computation(name, tuple(lines))
            elif found := _LINE.match(line):
                lines.append(_instruction(found[2], found[3], is_root=bool(found[1])))
        return cls(computations, entry, header)

    def walk(self) -> Iterator[Instruction]:
        for computation in self.computations.values():
            yield from computation.instructions


def _instruction(name: str, text: str, *, is_root: bool) -> Instruction:
    end = _balanced_end(text) if text.startswith("(") else text.index(" ")
    shape, text = text[:end], text[end:].lstrip()
    opcode, _, tail = text.partition("(")
    close = _balanced_end("(" + tail) - 1
    inside, rest = tail[: close - 1], tail[close:]
    operands = (inside,) if opcode == "parameter" else tuple(_NAME.findall(inside))
    return Instruction(name, opcode, tuple(_arrays(shape)), operands, rest, is_root)


def _arrays(shape: str) -> Iterator[Array]:
    for dtype, dims, layout in _ARRAY.findall(shape):
        yield Array(dtype, tuple(map(int, dims.split(","))) if dims else (), layout)


def _balanced_end(text: str) -> int:
    """Behind the parenthesis that closes the first one."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return at + 1
    raise ValueError(f"unbalanced: {text[:80]}")
