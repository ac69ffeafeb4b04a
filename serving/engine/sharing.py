"""share_step: how much batch work may share a step with people's. Pure.

A step takes as long as all of its rows and tiles together, so whoever streams waits for everyone else's work. Where
that is cheap, as where decoding is bound by reading weights, nobody is held back. Where measured times say that it is
not, batch rows take turns, so that a step lasts at most `Limits.share` times what interactive sequences alone would
take, and `Limits.share_first` times while one of them waits for its first token. In one step of `Limits.floor_every`
there is no bound: that is the floor of batch prompts, and it stays out of the 99th percentile.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kv.page_table import pages_for
from serving.engine.plan import Limits
from serving.engine.sequence import INTERACTIVE, Sequence
from serving.engine.slots import SlotTable
from serving.request import Priority


class Costs(Protocol):
    """What is known of the time of steps; `TripTimes` answers."""

    def of_step(self, num_rows: int, num_tiles: int) -> float | None:
        """Seconds of a step of that size, if one was measured."""
        ...

    def at_most(self, num_rows: int, num_tiles: int) -> float:
        """The least that was measured of any step at least as large; 0 as long as nobody knows."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    held_B: NDArray[np.bool_]
    """Batch slots that skip this step."""
    num_tiles: int
    """Tiles that chunks of batch requests may have."""


def share_step(waiting: Items[Sequence], slots: SlotTable, limits: Limits, costs: Costs, step: int) -> Sharing | None:
    """None where nothing is held back. `waiting` is in the order of rank; `step` counts plans."""
    if step % limits.floor_every == 0:
        return None
    people_B = slots.unfinished_B & ~slots.patient_B
    own_tiles = _first_tiles(waiting, slots, people_B, limits)
    if not (own_tiles or people_B.any()):
        return None
    ready_B = slots.decodes_B & slots.unfinished_B & ~slots.unread_B
    batch = np.flatnonzero(ready_B & slots.batch_B)
    num_own = int(np.count_nonzero(ready_B & ~slots.batch_B)) + bool(own_tiles)
    alone_s = costs.of_step(num_own, own_tiles)
    if alone_s is None:  # then this step tells
        return Sharing(_mask(batch, slots), 0)
    most_s = alone_s * (limits.share_first if own_tiles else limits.share)

    def fits(num_rows: int, num_tiles: int) -> bool:
        return costs.at_most(num_own + num_rows, own_tiles + num_tiles) <= most_s

    num_batch = next(count for count in _halves(len(batch)) if count == 0 or fits(count, 0))
    left = limits.max_tiles - own_tiles
    num_tiles = next(count for count in _halves(left) if count == 0 or fits(num_batch + 1, count))
    if num_batch == len(batch) and num_tiles == left:
        return None
    longest_held = batch[np.argsort(slots.decoded_at_B[batch], kind="stable")]
    return Sharing(_mask(longest_held[num_batch:], slots), num_tiles)


def _first_tiles(waiting: Items[Sequence], slots: SlotTable, people_B: NDArray[np.bool_], limits: Limits) -> int:
    """Tiles that interactive prompts would take of this step."""
    prefilling = slots.at(np.flatnonzero(people_B & ~slots.decodes_B))
    num_tiles = 0
    for sequence in (*prefilling, *islice(_people(waiting), limits.max_tiles)):
        num_tiles += pages_for(len(sequence.token_ids) - sequence.num_scheduled, limits.tile_tokens)
        if num_tiles >= limits.max_tiles:
            return limits.max_tiles
    return num_tiles


def _people(waiting: Items[Sequence]) -> Iterator[Sequence]:
    for sequence in waiting:
        if sequence.band != INTERACTIVE:
            return
        if sequence.request.priority is not Priority.BATCH:
            yield sequence


def _mask(chosen: NDArray[np.intp], slots: SlotTable) -> NDArray[np.bool_]:
    held_B = np.zeros(len(slots.sequences), np.bool_)
    held_B[chosen] = True
    return held_B


def _halves(most: int) -> Iterator[int]:
    """`most`, half of it, half of that, to 0: the compiled sizes are powers of two."""
    while most:
        yield most
        most //= 2
    yield 0
