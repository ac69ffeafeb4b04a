"""PagePool: who owns which page of the KV cache. Host only, no arrays of the device.

Page 0 is the null page: padded rows write there, and it is never handed out. Every other page is either free or held
by one or more owners (`share`), and comes back to the free list when the last owner releases it.
"""

from collections import Counter, deque
from collections.abc import Iterable

NULL_PAGE = 0


class PagePool:
    def __init__(self, num_pages: int) -> None:
        """`num_pages` counts the null page, as the device arrays do."""
        assert num_pages >= 2, "a pool needs the null page and one more"
        self._num_pages = num_pages
        self._free: deque[int] = deque(range(1, num_pages))
        self._owners = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """All pages but the null page."""
        return self._num_pages - 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each with one owner. The planner never asks for more than `num_free`."""
        assert 0 <= count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one owner to each page."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} is free and cannot be shared"
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take one owner off each page; a page without owners is free again."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} was released twice"
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)

    def check_integrity(self, held: Iterable[int] = ()) -> None:
        """Assert that every page is free or owned, never both, and that `held` lists each owner exactly once."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is on the free list twice"
        assert NULL_PAGE not in free, "the null page is on the free list"
        expected = Counter(held)
        for page in range(1, self._num_pages):
            owners = self._owners[page]
            assert (page in free) == (owners == 0), f"page {page} has {owners} owners and free={page in free}"
            assert owners == expected[page], f"page {page} has {owners} owners, {expected[page]} hold it"
