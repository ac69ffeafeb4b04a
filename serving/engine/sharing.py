"""share_step: what may share a step with people who stream. Pure.

A step takes as long as all of its rows and tiles together, so whoever streams waits for everyone else's work. Where
that is cheap, as where decoding is bound by reading weights, nobody is held back. Where measured times say otherwise:

- batch rows take turns, so that they make a step at most `Limits.share` times longer, and no longer than it is anyway
  while an interactive sequence waits for its first token;
- batch prompts have one step in `Limits.floor_every`, which takes at most `Limits.share_floor` times what decoding
  interactive rows alone takes.

In that step a batch row and a tile go along whatever they cost, the tile before more rows, so the batch band never
stands still; beside people's prompts, whose steps are long, only where no batch prompt went on for
`Limits.floor_every` such steps. People's own prompts have the whole chunk: shorter ones are more steps, and each pays
for the rows beside them.
"""

import math
from collections.abc import Callable, Iterator
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
    batch_tiles: int
    """Tiles that batch prompts may have beside people's."""
    is_floor: bool
    """Whether it is the batch band's step: promoted sequences then come before people who came later."""


def share_step(waiting: Items[Sequence], slots: SlotTable, limits: Limits, costs: Costs, step: int) -> Sharing | None:
    """None where nothing is held back. `waiting` is in the order of rank; `step` counts plans."""
    people_B = slots.unfinished_B & ~slots.patient_B
    people_tiles = _first_tiles(waiting, slots, people_B, limits)
    if not (people_tiles or people_B.any()):
        return None
    is_floor = step % limits.floor_every == 0
    ready_B = slots.decodes_B & slots.unfinished_B & ~slots.unread_B
    batch = np.flatnonzero(ready_B & slots.batch_B)
    num_own = int(np.count_nonzero(ready_B & ~slots.batch_B))
    decode_s = costs.of_step(num_own, 0) if num_own else None
    own_rows, left = num_own + bool(people_tiles), limits.max_tiles - people_tiles
    share, alone_s = 1.0 if people_tiles else limits.share, costs.of_step(own_rows, people_tiles)
    most_s = -math.inf if alone_s is None else share * alone_s  # if nobody knows, this step will tell
    if is_floor and decode_s is not None:
        most_s = max(most_s, limits.share_floor * decode_s)
    is_due = is_floor and (not people_tiles or step - slots.batch_prompt_at >= limits.floor_every**2)
    least_tiles = min(left, 1) if is_due and _has_batch_prompt(waiting, slots) else 0
    beside, tiles = own_rows + least_tiles, people_tiles + least_tiles
    num_batch = _fitting(len(batch), int(is_due), lambda n: costs.at_most(beside + n, tiles) <= most_s)
    beside = own_rows + num_batch + 1
    batch_tiles = _fitting(left, least_tiles, lambda n: costs.at_most(beside, people_tiles + n) <= most_s)
    if (num_batch, batch_tiles) == (len(batch), limits.max_tiles):
        return None
    longest_held = batch[np.argsort(slots.decoded_at_B[batch], kind="stable")]
    held_B = np.zeros(len(slots.sequences), np.bool_)
    held_B[longest_held[num_batch:]] = True
    return Sharing(held_B, batch_tiles, is_floor)


def _fitting(most: int, least: int, fits: Callable[[int], bool]) -> int:
    """`most`, or half of it, or half of that, ...: the compiled sizes are powers of two. At least `least`, if there are
    so many."""
    while most > least and not fits(most):
        most //= 2
    return most


def _first_tiles(waiting: Items[Sequence], slots: SlotTable, people_B: NDArray[np.bool_], limits: Limits) -> int:
    """Tiles that interactive prompts would take of this step."""
    prefilling = slots.at(np.flatnonzero(people_B & ~slots.decodes_B))
    num_tiles = 0
    for sequence in (*prefilling, *islice(_people(waiting), limits.max_tiles)):
        num_tiles += pages_for(len(sequence.token_ids) - sequence.num_scheduled, limits.tile_tokens)
        if num_tiles >= limits.max_tiles:
            return limits.max_tiles
    return num_tiles


def _has_batch_prompt(waiting: Items[Sequence], slots: SlotTable) -> bool:
    """The first that waits may be promoted; those of the batch band are last."""
    prefilling_B = slots.unfinished_B & slots.patient_B & ~slots.decodes_B
    return bool(prefilling_B.any()) or any(sequence.is_patient for sequence in (*waiting[:1], *waiting[-1:]))


def _people(waiting: Items[Sequence]) -> Iterator[Sequence]:
    for sequence in waiting:
        if sequence.band != INTERACTIVE:
            return
        if not sequence.is_patient:
            yield sequence
