"""PagePool: who owns which page of the KV cache. Host only, no arrays of the device.

Page 0 is the null page: padded rows write there, and it is never handed out. Every other page is in one of
three states:

    free    without owner, and what lies in it is worth nothing
    held    by one or more owners (`share`)
    idle    without owner, but kept for what lies in it (`keep`), until no page is free: then the one that was let go
            first is handed out
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable

NULL_PAGE = 0


class PagePool:
    def __init__(self, num_pages: int) -> None:
        """`num_pages` counts the null page, as the device arrays do."""
        assert num_pages >= 2, "a pool needs the null page and one more"
        self._num_pages = num_pages
        self._free: deque[int] = deque(range(1, num_pages))
        self._idle: OrderedDict[int, None] = OrderedDict()  # in the order of their last release
        self._owners = [0] * num_pages
        self._kept: set[int] = set()
        self._on_evict: Callable[[int], None] = _nobody_listens

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def kept_pages(self) -> frozenset[int]:
        """Pages that are idle or will be; for integrity checks."""
        return frozenset(self._kept)

    @property
    def num_usable(self) -> int:
        """All pages but the null page."""
        return self._num_pages - 1

    def listen(self, on_evict: Callable[[int], None]) -> None:
        """`on_evict(page)` is called when an idle page is handed out: from now on it holds something else."""
        self._on_evict = on_evict

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each with one owner. The planner never asks for more than `num_free`."""
        assert 0 <= count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        pages = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one owner to each page, held or idle."""
        for page in pages:
            assert self._owners[page] > 0 or page in self._idle, f"page {page} is free and cannot be shared"
            self._idle.pop(page, None)
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take one owner off each page; without owners a kept page is idle and any other free."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} was released twice"
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._let_go(page)

    def keep(self, page: int) -> None:
        """What lies in this held page is worth something after its last release, until it is evicted."""
        assert self._owners[page] > 0, f"page {page} has no owner and cannot be kept"
        self._kept.add(page)

    def drop_kept(self) -> None:
        """Nothing that lies in any page is worth anything after its last release."""
        self._kept.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def count_idle(self, pages: Iterable[int]) -> int:
        """How many of these pages `share` would take from `num_free`."""
        return sum(page in self._idle for page in pages)

    def count_sole(self, pages: Iterable[int]) -> int:
        """How many of these pages `release` would surely give to `num_free`: those with one owner."""
        return sum(self._owners[page] == 1 for page in pages)

    def check_integrity(self, held: Iterable[int] = ()) -> None:
        """Assert that every page is free, held or idle and nothing else, and that `held` lists each owner once."""
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a page is on the free list twice"
        assert NULL_PAGE not in free | idle, "the null page can be handed out"
        assert idle <= self._kept, "an idle page is not kept"
        expected = Counter(held)
        for page in range(1, self._num_pages):
            owners = self._owners[page]
            assert owners == expected[page], f"page {page} has {owners} owners, {expected[page]} hold it"
            states = (page in free) + (page in idle) + (owners > 0)
            assert states == 1, f"page {page} has {owners} owners, free={page in free}, idle={page in idle}"
            assert page not in free or page not in self._kept, f"page {page} is free and kept"

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._kept.remove(page)
        self._on_evict(page)
        return page

    def _let_go(self, page: int) -> None:
        if page in self._kept:
            self._idle[page] = None
        else:
            self._free.append(page)


def _nobody_listens(page: int) -> None:
    pass
