"""Growth: pages for the next token of everyone who decodes, and who is preempted when there are not enough.

The worst rank is preempted first, and the best can always go on: so every sequence ends.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.engine.plan import Limits, PageReader
from serving.engine.sequence import Sequence
from serving.engine.slots import SlotTable


@dataclass(frozen=True, slots=True, eq=False)
class Growth:
    decode: NDArray[np.intp]
    """Slots that decode."""
    grow: NDArray[np.intp]
    """Those of them that need a page for it."""
    free_pages: int
    """What is left."""
    preempt: tuple[Sequence, ...] = ()
    """Worst rank first."""


def plan_growth(slots: SlotTable, pages: PageReader, limits: Limits) -> Growth:
    """Pure. Pages promised never exceed the free ones plus those that the preempted surely give back."""
    decode = slots.decoding()
    short = decode[slots.num_tokens_B[decode] > pages.num_pages_B[decode] * limits.page_size]
    num_free = pages.num_free
    if len(short) <= num_free:
        return Growth(decode, short, num_free - len(short))
    return _preempting(slots, decode, set(short.tolist()), pages)


def _preempting(slots: SlotTable, decode: NDArray[np.intp], short: set[int], pages: PageReader) -> Growth:
    """From the best rank on, everyone who is short takes pages from the worst: perhaps, at last, from itself."""
    candidates = slots.ranked(slots.unfinished_B)  # the others give their pages back by ending
    gone: dict[int, Sequence] = {}
    grow: set[int] = set()
    num_free = pages.num_free
    for sequence in candidates.copy():
        if sequence.slot not in short:
            continue
        while num_free == 0 and candidates and sequence.slot not in gone:
            victim = candidates.pop()
            gone[victim.slot] = victim
            num_free += pages.num_releasable(victim)
        if sequence.slot in gone:
            break  # so is everyone behind it
        if num_free:
            num_free -= 1
            grow.add(sequence.slot)
    decoding = [slot for slot in decode.tolist() if slot not in gone and (slot in grow or slot not in short)]
    return Growth(_array(decoding), _array(sorted(grow)), num_free, tuple(gone.values()))


def _array(slots: list[int]) -> NDArray[np.intp]:
    return np.asarray(slots, np.intp)
