"""Growth: how many tokens the next call gives everyone who decodes, pages for them, and who is preempted when there are
not enough for one token each.

The worst rank is preempted first, and the best can always go on: so every sequence ends.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

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
    """Those of them that need pages for it, rising, once per column."""
    free_pages: int
    """What is left."""
    fill: dict[int, int] = field(default_factory=dict)
    """Slots that prefill, and the pages that they need for their next chunk."""
    num_trips: int = 1
    """Tokens for each."""
    with_drafts: bool = False
    """Whether there are pages for guesses, too."""
    preempt: tuple[Sequence, ...] = ()
    """Worst rank first."""


def choose_trips(slots: SlotTable, limits: Limits, trip_s: float) -> int:
    """The most trips that a call may have when nobody waits or prefills and a trip takes `trip_s` seconds.

    One, where some row's tokens must be looked at one by one (a grammar, log-probabilities, many stop ids), or is left
    out until it has been read.
    """
    if limits.max_trips == 1 or (slots.watched_B | slots.unread_B).any():
        return 1
    return limits.max_trips if trip_s <= 0 else int(max(1, min(limits.max_trips, limits.max_call_s // trip_s)))


def plan_growth(
    slots: SlotTable,
    pages: PageReader,
    limits: Limits,
    max_trips: int = 1,
    num_drafts_B: NDArray[np.int64] | None = None,
    held_B: NDArray[np.bool_] | None = None,
    prefilling: Iterable[Sequence] = (),
) -> Growth:
    """Pure. For all who can decode but those held back: guesses if there are pages for them, else as many trips as
    there are pages for, up to `max_trips`; preempts for the first alone, and for the next chunks of `prefilling`.

    Pages promised never exceed the free ones plus those that the preempted surely give back.
    """
    decode = slots.decoding(held_B)
    num_free, num_sets = pages.num_free, pages.num_sets
    num_tokens_r, num_pages_r = slots.num_tokens_B[decode], pages.num_pages_B[decode]
    if num_drafts_B is not None:
        want_r = num_tokens_r + num_drafts_B[decode]
        grow = np.repeat(decode, np.maximum(-(-want_r // limits.page_size) - num_pages_r, 0))
        if len(grow) * num_sets <= num_free:
            return Growth(decode, grow, num_free - len(grow) * num_sets, with_drafts=True)
    for num_trips in range(max_trips, 1, -1):
        # The last of these tokens stays without keys and values until it is fed back.
        want_r = num_tokens_r + slots.num_due(decode, num_trips) - 1
        grow = np.repeat(decode, np.maximum(-(-want_r // limits.page_size) - num_pages_r, 0))
        if len(grow) * num_sets <= num_free:
            return Growth(decode, grow, num_free - len(grow) * num_sets, num_trips=num_trips)
    short = decode[num_tokens_r > num_pages_r * limits.page_size]
    fill = {s.slot: count for s in prefilling if (count := pages.num_to_fill(s, limits.chunk_tokens))}
    wanted = len(short) * num_sets + sum(fill.values())
    if wanted <= num_free:
        return Growth(decode, short, num_free - wanted, fill)
    return _preempting(slots, decode, dict.fromkeys(short.tolist(), num_sets), fill, pages)


def _preempting(
    slots: SlotTable, decode: NDArray[np.intp], short: dict[int, int], fill: dict[int, int], pages: PageReader
) -> Growth:
    """From the best rank on, everyone who is short takes pages from the worst: perhaps, at last, from itself. By slot
    how many those need who decode, and those who prefill."""
    candidates = slots.ranked(slots.unfinished_B)  # the others give their pages back by ending
    gone: dict[int, Sequence] = {}
    given: set[int] = set()
    wanted = short | fill
    num_free = pages.num_free
    for sequence in candidates.copy():
        need = wanted.get(sequence.slot, 0)
        if not need:
            continue
        while num_free < need and candidates and sequence.slot not in gone:
            victim = candidates.pop()
            gone[victim.slot] = victim
            num_free += pages.num_releasable(victim)
        if sequence.slot in gone:
            break  # so is everyone behind it
        if num_free >= need:
            num_free -= need
            given.add(sequence.slot)
    decoding = [slot for slot in decode.tolist() if slot not in gone and (slot in given or slot not in short)]
    return Growth(
        _array(decoding),
        _array(sorted(given & short.keys())),
        num_free,
        {slot: fill[slot] for slot in given & fill.keys()},
        preempt=tuple(gone.values()),
    )


def _array(slots: list[int]) -> NDArray[np.intp]:
    return np.asarray(slots, np.intp)
