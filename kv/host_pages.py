"""HostPages: the second tier of the prefix cache. Pages that the device had no room for any more lie in the host's
memory, and come back when a text begins with them. Imports no JAX: what is copied is decided here, and done elsewhere.

The page that was used longest ago gives way first. One that came back stays here too, so that nothing is copied when
the device evicts it again.

A copy is *on its way* from the call that begins it until a step that was dispatched behind it has been read. Pages on
their way out still lie on the device, beside the pool, and so do those on their way in: of each there are never more
than `most_copies`. What is evicted beyond that is lost, the oldest first.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_COPIES = 128
"""Pages on their way in one direction: of 2 MiB each, a quarter of a GiB."""

Name = tuple[int, bytes]
"""The number of a set of layers and a page's key."""
PageArrays = tuple[Any, ...]
"""Of each array of a cache its part of one page: on the device at first, then in the host's memory. Never written."""


@dataclass(slots=True, eq=False)
class HostPage:
    arrays: PageArrays

    def arrive(self) -> None:
        """The copy to the host was begun before something that has been read since."""
        self.arrays = tuple(map(np.asarray, self.arrays))


@dataclass(frozen=True, slots=True)
class PageCopies:
    """To be done before the next step, in the order of the fields: a page may be in both."""

    out: tuple[tuple[Name, int], ...] = ()
    """Evicted pages, and what lay in them."""
    back: tuple[tuple[int, PageArrays], ...] = ()
    """Pages, and what is to lie in them."""

    def __bool__(self) -> bool:
        return bool(self.out or self.back)


NO_COPIES = PageCopies()


class HostPages:
    """Owned by the engine's thread."""

    def __init__(self, num_pages: int = 0, most_copies: int = 0) -> None:
        """Room for `num_pages`; without any nothing is ever here."""
        self._num_pages = num_pages
        self._most_copies = min(most_copies, num_pages)
        self._pages: OrderedDict[Name, HostPage] = OrderedDict()
        self._leaving: list[HostPage] = []
        self._num_entering = 0
        self._on_way: deque[tuple[list[HostPage], int]] = deque()
        """Of each dispatched step that has not been read, what was copied before it: out and back."""

    def __bool__(self) -> bool:
        return self._num_pages > 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, name: Name) -> bool:
        return name in self._pages

    @property
    def names(self) -> tuple[Name, ...]:
        """Used longest ago first."""
        return tuple(self._pages)

    @property
    def most_copies(self) -> int:
        return self._most_copies

    @property
    def num_copies_back(self) -> int:
        """Pages that may be copied back now."""
        return self._most_copies - self._num_entering - sum(count for _, count in self._on_way)

    def use(self, names: Sequence[Name]) -> list[PageArrays]:
        """What lies in these pages of a text, which are here, to be copied back."""
        for name in reversed(names):  # the end gives way before the beginning
            self._pages.move_to_end(name)
        self._num_entering += len(names)
        return [self._pages[name].arrays for name in names]

    def choose(self, evicted: Sequence[tuple[Name, int]]) -> tuple[tuple[Name, int], ...]:
        """Of pages that the device has evicted, those to be copied. In the order of their eviction a text's end stands
        before its beginning, without which it could not be found: of too many the last ones are taken."""
        new = []
        for name, page in evicted:
            if name in self._pages:
                self._pages.move_to_end(name)
            else:
                new.append((name, page))
        room = self._most_copies - len(self._leaving) - sum(len(pages) for pages, _ in self._on_way)
        return tuple(new[max(len(new) - room, 0) :])

    def put(self, name: Name, arrays: PageArrays) -> None:
        """A chosen page, whose copy has begun."""
        page = self._pages[name] = HostPage(arrays)
        self._leaving.append(page)
        while len(self._pages) > self._num_pages:
            _, oldest = self._pages.popitem(last=False)
            oldest.arrays = ()

    def dispatched(self) -> None:
        """A step, behind all copies so far."""
        if self:
            self._on_way.append((self._leaving, self._num_entering))
            self._leaving, self._num_entering = [], 0

    def read(self) -> bool:
        """The step that was dispatched first of those that have not been read: what was copied before it is there.
        Returns whether there was anything."""
        if not self:
            return False
        leaving, num_entering = self._on_way.popleft()
        for page in leaving:
            page.arrive()
        return bool(leaving or num_entering)

    def check_integrity(self) -> None:
        """Assert that nothing is beyond its bound."""
        assert len(self._pages) <= self._num_pages, "the host holds more pages than it has room for"
        num_out = len(self._leaving) + sum(len(pages) for pages, _ in self._on_way)
        assert num_out <= self._most_copies and self.num_copies_back >= 0, "too many copies are on their way"
