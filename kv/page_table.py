"""PageTable: which pages each slot's sequence lies in, as the int32 rows that a step uploads. Host only."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kv.page_pool import NULL_PAGE


class PageTable:
    """A slot has a row of pages in each set of layers (`kv.layer_sets`); in most models all layers are one set. What
    stands at the same place of these rows, a *column*, holds the same tokens."""

    def __init__(self, num_slots: int, pages_per_slot: int, num_sets: int = 1) -> None:
        self.page_indices_WBJ: NDArray[np.int32] = np.full((num_sets, num_slots, pages_per_slot), NULL_PAGE, np.int32)
        """Rows list the pages of a slot in token order, then the null page; which also stands for pages that were given
        back and those that are still to come."""
        self.num_pages_B: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        """Columns. All are counted: a token's position says where its page stands."""
        self.num_trimmed_WB: NDArray[np.int32] = np.zeros((num_sets, num_slots), np.int32)
        """The first so many pages have been given back."""
        self.num_missing_WB: NDArray[np.int32] = np.zeros((num_sets, num_slots), np.int32)
        """The last so many pages are still to come."""

    @property
    def num_sets(self) -> int:
        return int(self.page_indices_WBJ.shape[0])

    @property
    def num_slots(self) -> int:
        return int(self.page_indices_WBJ.shape[1])

    @property
    def pages_per_slot(self) -> int:
        return int(self.page_indices_WBJ.shape[2])

    def pages(self, slot: int, start: int | None = None, end: int | None = None, of_set: int = 0) -> list[int]:
        """The slot's pages in token order, or those from `start` to before `end`; the caller knows that they are
        there."""
        first = int(self.num_trimmed_WB[of_set, slot]) if start is None else start
        last = self.num_filled(slot, of_set) if end is None else end
        return self.page_indices_WBJ[of_set, slot, first:last].tolist()

    def all_pages(self, slot: int) -> list[int]:
        """Of all sets, one after the other."""
        return [page for number in range(self.num_sets) for page in self.pages(slot, of_set=number)]

    def num_filled(self, slot: int, of_set: int) -> int:
        """The column before which there are pages, but for those that were given back."""
        return int(self.num_pages_B[slot] - self.num_missing_WB[of_set, slot])

    def append(self, slot: int, count: int) -> None:
        """So many columns, for which pages are to come in every set."""
        assert self.num_pages_B[slot] + count <= self.pages_per_slot, (
            f"slot {slot} would outgrow {self.pages_per_slot} pages"
        )
        self.num_pages_B[slot] += count
        self.num_missing_WB[:, slot] += count

    def skip(self, slot: int, count: int, of_set: int) -> None:
        """The next columns of a set need no pages: nobody looks at them."""
        self.num_trimmed_WB[of_set, slot] += count
        self.num_missing_WB[of_set, slot] -= count

    def fill(self, slot: int, pages: Sequence[int], of_set: int = 0) -> None:
        """The next pages of a set that are to come."""
        start = self.num_filled(slot, of_set)
        assert len(pages) <= self.num_missing_WB[of_set, slot], f"slot {slot} has no room for {len(pages)} pages"
        self.page_indices_WBJ[of_set, slot, start : start + len(pages)] = pages
        self.num_missing_WB[of_set, slot] -= len(pages)

    def append_each(self, slots: NDArray[np.intp], pages: Sequence[int]) -> None:
        """One column for each of these slots, which are rising; a slot that stands there twice gets two. `pages` are
        those of the first set, then those of the next."""
        nth = np.arange(len(slots)) - slots.searchsorted(slots)
        ends = self.num_pages_B[slots] + nth
        assert ends.max(initial=0) < self.pages_per_slot, "a slot would outgrow its row"
        for table_BJ, of_set in zip(self.page_indices_WBJ, np.reshape(pages, (self.num_sets, -1)), strict=True):
            table_BJ[slots, ends] = of_set
        self.num_pages_B[slots] = ends + 1  # of a repeated slot the last one counts

    def trim(self, slot: int, count: int, of_set: int = 0) -> list[int]:
        """Give back the first `count` pages; returns those that were still there."""
        assert count <= self.num_filled(slot, of_set), f"slot {slot} has no {count} pages to give back"
        pages = self.pages(slot, end=count, of_set=of_set)
        self.page_indices_WBJ[of_set, slot, :count] = NULL_PAGE
        self.num_trimmed_WB[of_set, slot] = count
        return pages

    def clear(self, slot: int) -> list[list[int]]:
        """Empty the rows and return the pages that each held."""
        pages = [self.pages(slot, of_set=number) for number in range(self.num_sets)]
        self.page_indices_WBJ[:, slot, : self.num_pages_B[slot]] = NULL_PAGE
        self.num_pages_B[slot] = 0
        self.num_trimmed_WB[:, slot] = self.num_missing_WB[:, slot] = 0
        return pages

    def held_pages(self) -> list[int]:
        """All pages of all rows, with repetition; for integrity checks."""
        return [page for slot in range(self.num_slots) for page in self.all_pages(slot)]

    def check_integrity(self, most: Iterable[int]) -> None:
        """Assert that there are pages exactly where the counts say, and in each set at most so many of a slot."""
        columns_J = np.arange(self.pages_per_slot)
        filled_WB = self.num_pages_B - self.num_missing_WB
        is_held_WBJ = (columns_J >= self.num_trimmed_WB[..., None]) & (columns_J < filled_WB[..., None])
        assert ((self.page_indices_WBJ != NULL_PAGE) == is_held_WBJ).all(), "a page is missing or left over"
        held_WB = is_held_WBJ.sum(axis=2)
        assert (held_WB <= np.asarray([*most])[:, None]).all(), "a sequence holds pages beyond its window"


def pages_for(num_tokens: int, page_size: int) -> int:
    """How many pages hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)
