"""Regions: reads the part of a leaf that a device holds out of the tensors that make it, and no more of them than that.

A region is one slice per axis, with a start and a stop.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from model.config import ModelConfig
from model.foreign import Array, Region
from model.keys import Key, Part

Read = Callable[[str, Region], Array]
"""A region of a tensor, by its name."""


def whole(shape: Sequence[int]) -> Region:
    return tuple(slice(0, size) for size in shape)


def region_shape(region: Region) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in region)


def fill(out: Array, region: Region, keys: Sequence[Key], config: ModelConfig, read: Read) -> Iterator[int]:
    """Write what the tensors of `keys` hold of a leaf's `region` into `out`; yields the bytes written."""
    for key in keys:
        for part in key.parts(config):
            if (found := _overlap(part, region, key.leaf_shape(config))) is None:
                continue
            there, ranges = found
            numbers = _read(key, part, ranges, config, read)
            place = out[there]
            place[...] = numbers if key.times == 1.0 else numbers.astype(np.float32) * np.float32(key.times)
            yield place.nbytes


def _overlap(
    part: Part, region: Region, leaf_shape: tuple[int, ...]
) -> tuple[tuple[int | slice, ...], list[range]] | None:
    """Where in the region the tensor's numbers go, and which of them, by each dimension that it has in the leaf; None
    if none do."""
    there: list[int | slice] = []
    ranges: list[range] = []
    for at, wanted, size in zip(part.at, region, leaf_shape, strict=True):
        if isinstance(at, int):
            index = at % size
            if not wanted.start <= index < wanted.stop:
                return None
            there.append(index - wanted.start)
            continue
        covered = range(size)[at]
        inside = range(bisect_left(covered, wanted.start), bisect_left(covered, wanted.stop))
        if not inside:
            return None
        there.append(slice(covered[inside[0]] - wanted.start, covered[inside[-1]] - wanted.start + 1, covered.step))
        ranges.append(inside)
    return tuple(there), ranges


@dataclass(frozen=True, slots=True)
class _Dimension:
    size: int
    wanted: range

    @property
    def is_whole(self) -> bool:
        return len(self.wanted) == self.size


def _read(key: Key, part: Part, ranges: list[range], config: ModelConfig, read: Read) -> Array:
    """The wanted numbers of one tensor, with its dimensions in the leaf's order."""
    ours = key.stacked + key.ours
    sizes = key.sizes(config, ours)
    dimensions = {letter: _Dimension(size, wanted) for letter, size, wanted in zip(ours, sizes, ranges, strict=True)}
    region: list[slice] = []
    shape: list[int] = []
    picks: list[slice] = []
    for axis in map(key.atoms, key.theirs):
        first, *rest = [dimensions[letter] for letter in axis]
        inner = prod(dimension.size for dimension in rest)
        # Of a flattened pair, what is wanted is one run of numbers if all of the inner dimension is.
        is_run = all(dimension.is_whole for dimension in rest)
        wanted = first.wanted if is_run else range(first.size)
        region.append(slice(wanted.start * inner, wanted.stop * inner))
        shape += [len(wanted), *(dimension.size for dimension in rest)]
        picks.append(slice(None) if is_run else slice(first.wanted.start, first.wanted.stop))
        picks += [slice(dimension.wanted.start, dimension.wanted.stop) for dimension in rest]
    theirs = key.atoms("".join(key.theirs))
    numbers = read(part.name, tuple(region)).reshape(shape)[tuple(picks)]
    numbers = numbers.transpose([theirs.index(letter) for letter in ours])
    if key.is_interleaved:
        pairs = numbers.reshape(*numbers.shape[:-1], -1, 2)
        numbers = np.concatenate([pairs[..., 0], pairs[..., 1]], axis=-1)
    return numbers
