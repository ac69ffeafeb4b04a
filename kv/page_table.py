"""PageTable: which pages each slot's sequence lies in, as the int32 rows that a step uploads. Host only."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv.page_pool import NULL_PAGE


class PageTable:
    def __init__(self, num_slots: int, pages_per_slot: int) -> None:
        self.page_indices_BJ: NDArray[np.int32] = np.full((num_slots, pages_per_slot), NULL_PAGE, np.int32)
        """Row b lists the pages of slot b in token order, then the null page; which also stands for trimmed ones."""
        self.num_pages_B: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        """Trimmed pages are counted: a token's position says where its page stands."""
        self.num_trimmed_B: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        """The first so many pages have been given back."""

    @property
    def pages_per_slot(self) -> int:
        return int(self.page_indices_BJ.shape[1])

    def pages(self, slot: int, start: int | None = None, end: int | None = None) -> list[int]:
        """The slot's pages in token order, or those from `start` to before `end`."""
        first = int(self.num_trimmed_B[slot]) if start is None else start
        last = int(self.num_pages_B[slot]) if end is None else end
        return self.page_indices_BJ[slot, first:last].tolist()

    def append(self, slot: int, pages: Sequence[int]) -> None:
        start = int(self.num_pages_B[slot])
        assert start + len(pages) <= self.pages_per_slot, f"slot {slot} would outgrow {self.pages_per_slot} pages"
        self.page_indices_BJ[slot, start : start + len(pages)] = pages
        self.num_pages_B[slot] = start + len(pages)

    def append_each(self, slots: NDArray[np.intp], pages: Sequence[int]) -> None:
        """One page for each of these slots, which are rising; a slot that stands there twice gets two."""
        nth = np.arange(len(slots)) - np.searchsorted(slots, slots)
        ends = self.num_pages_B[slots] + nth
        assert not (ends >= self.pages_per_slot).any(), "a slot would outgrow its row"
        self.page_indices_BJ[slots, ends] = pages
        self.num_pages_B[slots] = ends + 1  # of a repeated slot the last one counts

    def trim(self, slot: int, count: int) -> list[int]:
        """Give back the first `count` pages; returns those that were still there."""
        assert count <= self.num_pages_B[slot], f"slot {slot} has no {count} pages to give back"
        pages = self.pages(slot, end=count)
        self.page_indices_BJ[slot, :count] = NULL_PAGE
        self.num_trimmed_B[slot] = count
        return pages

    def clear(self, slot: int) -> list[int]:
        """Empty the row and return the pages it held."""
        pages = self.pages(slot)
        self.page_indices_BJ[slot, : self.num_pages_B[slot]] = NULL_PAGE
        self.num_pages_B[slot] = self.num_trimmed_B[slot] = 0
        return pages

    def held_pages(self) -> list[int]:
        """All pages of all rows, with repetition; for integrity checks."""
        return [page for slot in range(len(self.num_pages_B)) for page in self.pages(slot)]


def pages_for(num_tokens: int, page_size: int) -> int:
    """How many pages hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)
