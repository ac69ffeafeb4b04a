"""AdmissionDraft: who prefills and who enters in the step that is being planned. Changes nothing that it reads.

An interactive sequence that finds no slot or too few pages takes them from batch sequences, worst rank first, and only
if that is enough. Everyone leaves room for the growth of those who run in the own band or a better one.
"""

from collections.abc import Iterable
from itertools import islice

import numpy as np

from kv.page_table import pages_for
from serving.engine.growth import Growth
from serving.engine.pages import Match
from serving.engine.plan import Admission, Chunk, Limits, PageReader
from serving.engine.sequence import BANDS, BATCH, INTERACTIVE, Sequence
from serving.engine.slots import SlotTable


class AdmissionDraft:
    """Lives for one call of `plan_step` and keeps count of what the step has left to give."""

    def __init__(
        self, slots: SlotTable, pages: PageReader, limits: Limits, growth: Growth, batch_tiles: int | None = None
    ) -> None:
        """Of the step's tiles, batch work may have `batch_tiles`; None: all of them."""
        self.admit: list[Admission] = []
        self.prefill: list[Chunk] = []
        self.preempt: dict[int, Sequence] = {}
        """By slot."""
        self._slots, self._pages, self._limits, self._growth = slots, pages, limits, growth
        self._num_slots = slots.num_free
        self._num_tiles = limits.max_tiles
        self._num_batch_tiles = limits.max_tiles if batch_tiles is None else batch_tiles
        self._num_pages = self._sure_pages = growth.free_pages
        """The second counts admitted sequences as if no page of theirs were shared. Shared pages may be those of a
        sequence that is preempted afterwards, and would be counted twice: as found and as given back."""
        self._num_copies_back = pages.num_copies_back
        self._reserve = self._expected_growth()
        self._victims = slots.ranked(slots.unfinished_B & slots.batch_B)

    def go_on(self, sequences: Iterable[Sequence]) -> None:
        """Next chunks of running sequences."""
        for sequence in sequences:
            if self._tiles_for(sequence) and sequence.slot not in self.preempt:
                self._add_chunk(sequence, sequence.num_scheduled)

    def enter(self, waiting: Iterable[Sequence], band: int) -> bool:
        """Admit sequences of one band until one does not fit: then nobody behind it may pass, and False is returned."""
        for sequence in islice(waiting, len(self.admit), None):
            if sequence.band != band:
                return True
            if not self._admit(sequence):
                return False
        return True

    def _admit(self, sequence: Sequence) -> bool:
        # The newest token of a sequence that was just preempted may not have been read yet.
        if self._tiles_for(sequence) == 0 or sequence.num_pending or not (self._num_slots or self._victims):
            return False
        match = self._pages.match(sequence)
        total = pages_for(len(sequence.token_ids) + 1, self._limits.page_size)
        new, shared = self._pages.num_new(total, match), len(match.beginning.all_pages)
        num_away = match.beginning.num_away
        if num_away > self._num_copies_back:  # one of the next steps has room for all, since nobody may pass
            return False
        cost = self._cost(sequence, match, new, shared)
        if cost is None:
            return False
        self._num_copies_back -= num_away
        self._num_slots -= 1
        self._num_pages -= cost
        self._sure_pages -= new + shared
        self._reserve[sequence.band] += self._growth_of(sequence, total)
        self.admit.append(Admission(sequence, match, total))
        self._add_chunk(sequence, match.num_columns * self._limits.page_size)
        return True

    def _cost(self, sequence: Sequence, match: Match, new: int, shared: int) -> int | None:
        """Free pages that admitting it takes, perhaps after preempting for it; None when it cannot be admitted."""
        # What it found may belong to someone who is preempted in this plan: counted as given back already.
        cost = new + (shared if self.preempt else match.num_idle)
        reserve = sum(self._reserve[: sequence.band + 1])
        if self._num_slots and cost + reserve <= self._num_pages:
            return cost
        if sequence.band == INTERACTIVE and self._make_room(new + shared + reserve):
            return new + shared
        return None

    def _make_room(self, need: int) -> bool:
        """Preempt batch sequences until there is a slot and `need` pages, or nobody if that cannot be reached."""
        victims, chosen = self._victims.copy(), []
        num_slots, num_pages = self._num_slots, self._sure_pages
        while num_slots == 0 or num_pages < need:
            if not victims:
                return False
            chosen.append(victim := victims.pop())
            num_slots += 1
            num_pages += self._pages.num_releasable(victim) + self._promised(victim.slot)
        self._victims = victims
        self._num_slots = num_slots
        self._num_pages = self._sure_pages = num_pages
        self.preempt |= {victim.slot: victim for victim in chosen}
        return True

    def _promised(self, slot: int) -> int:
        """Pages that it would get in this step."""
        return self._growth.fill.get(slot, 0) + self._pages.num_sets * int(slot in self._growth.grow)

    def _expected_growth(self) -> list[int]:
        """Pages, by band, that those who run will want beside what they have."""
        slots, limits = self._slots, self._limits
        ahead_B = np.minimum(slots.num_tokens_B + limits.growth_tokens, slots.max_len_B)
        want_B = np.maximum(-(-ahead_B // limits.page_size) - self._pages.num_pages_B, 0)
        want_B[self._growth.grow] -= 1  # promised already
        want_B *= self._pages.num_sets
        in_batch = int(want_B[slots.batch_B].sum())
        return [int(want_B.sum()) - in_batch, in_batch]

    def _growth_of(self, sequence: Sequence, num_columns: int) -> int:
        ahead = min(len(sequence.token_ids) + self._limits.growth_tokens, sequence.max_len)
        return self._pages.num_sets * max(pages_for(ahead, self._limits.page_size) - num_columns, 0)

    def _tiles_for(self, sequence: Sequence) -> int:
        return min(self._num_tiles, self._num_batch_tiles) if sequence.is_patient else self._num_tiles

    def _add_chunk(self, sequence: Sequence, start: int) -> None:
        tile = self._limits.tile_tokens
        length = min(len(sequence.token_ids) - start, self._tiles_for(sequence) * tile)
        num_tiles = pages_for(length, tile)
        self._num_tiles -= num_tiles
        if sequence.is_patient:
            self._num_batch_tiles -= num_tiles
        self.prefill.append(Chunk(sequence, start, length))


assert tuple(range(len(BANDS))) == (INTERACTIVE, BATCH), "bands are indices, the better first"
