"""PrefixCache: which pages hold which beginning of a text, so that it is computed once. Host only.

A page is published under its key (`kv.page_keys`) when the step that filled it has completed. Whoever starts with the
same tokens shares the page: nothing is copied, since a full page is never written again. A published page without
owners stays in the pool as idle; when the pool needs it, it is evicted and its key forgotten.

Where there are several sets of layers (`kv.layer_sets`), a key names a page in each. Of those sets that have a window a
beginning needs the pages only that the tokens behind it see.

Where the host's memory is a second tier (`kv.host_pages`), a beginning may be found there in part. Of what is evicted
the cache keeps a list, to be copied before anything else is written there.

A sequence releases its pages last first. So the end of a chain is evicted before its beginning, without which it could
not be found.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kv.host_pages import HostPages, Name
from kv.layer_sets import Reach
from kv.page_pool import NULL_PAGE, PagePool

AWAY = NULL_PAGE
"""Stands for a page that is in the host's memory only."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """Published pages of the first tokens of a text."""

    num_columns: int = 0
    """Pages' worth of tokens."""
    pages: tuple[tuple[int, ...], ...] = ()
    """Of each set, in order: those of its last columns, or AWAY."""

    @property
    def all_pages(self) -> list[int]:
        """That are on the device."""
        return [page for of_set in self.pages for page in of_set if page != AWAY]

    @property
    def num_away(self) -> int:
        return sum(of_set.count(AWAY) for of_set in self.pages)


NONE_FOUND = Beginning()


class PrefixCache:
    """An index over the pool's kept pages. Owned by the engine's thread, as the pool is."""

    def __init__(self, pool: PagePool, reach: Reach, *, enabled: bool = True, host: HostPages | None = None) -> None:
        """A cache that is not enabled takes nothing and finds nothing. `host` is its second tier, if it has one."""
        self._pool = pool
        self._reach = reach
        self._enabled = enabled
        self._pages: tuple[dict[bytes, int], ...] = tuple({} for _ in reach.windows)
        self._keys: dict[int, Name] = {}  # of each page its set and key
        self._host = HostPages() if host is None else host
        self._evicted: list[tuple[Name, int]] = []
        pool.listen(self._forget)

    @property
    def enabled(self) -> bool:
        return self._enabled

    @property
    def num_pages(self) -> int:
        return len(self._keys)

    def match(self, keys: Sequence[bytes]) -> Beginning:
        """The longest published beginning of the chain `keys` of which no more is away than may be copied back at once.
        Its pages are not held yet: share them before anything is allocated."""
        count = self._num_in_all(keys)
        while count:
            if (missing := self._last_missing(keys, count)) is not None:
                count = missing  # what needs it is longer
            elif (found := self._beginning(keys, count)).num_away > self._host.most_copies:
                count -= 1
            else:
                return found
        return NONE_FOUND

    def publish(self, keys: Iterable[bytes], pages: Iterable[int], of_set: int = 0) -> None:
        """Offer full pages, held by the caller and completely written, under their keys.

        Of two sequences that computed the same page the first one's stays; the other page is freed with its sequence.
        """
        if self._enabled:
            known = self._pages[of_set]
            for key, page in zip(keys, pages, strict=True):
                if key not in known:
                    self._pool.keep(page)
                    known[key] = page
                    self._keys[page] = of_set, key

    def take_evicted(self) -> list[tuple[Name, int]]:
        """What was evicted since the last call, in order, and where it lies until something else is written there.
        Nothing without a second tier."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def clear(self) -> None:
        """Forget everything: what lies in the pages is not to be trusted, or belongs to other weights."""
        for known in self._pages:
            known.clear()
        self._keys.clear()
        self._pool.drop_kept()

    def check_integrity(self) -> None:
        """Assert that keys and pages name each other, and that the pool keeps exactly these pages."""
        named = {page: (number, key) for number, known in enumerate(self._pages) for key, page in known.items()}
        assert named == self._keys, "keys and pages do not match"
        assert self._pool.kept_pages == self._keys.keys(), "the pool keeps other pages than the cache"

    @property
    def _by_window(self) -> Iterator[tuple[dict[bytes, int], int | None]]:
        return zip(self._pages, self._reach.windows, strict=True)

    def _first_needed(self, window: int | None, count: int) -> int:
        """Of a beginning of so many columns."""
        return self._reach.first_seen(window, count * self._reach.page_size)

    def _beginning(self, keys: Sequence[bytes], count: int) -> Beginning:
        spans = [(pages, keys[self._first_needed(window, count) : count]) for pages, window in self._by_window]
        return Beginning(count, tuple(tuple(pages.get(key, AWAY) for key in needed) for pages, needed in spans))

    def _num_in_all(self, keys: Sequence[bytes]) -> int:
        """Columns up to which every set without a window has all pages, and few enough of them are away."""
        whole = [(number, pages) for number, (pages, window) in enumerate(self._by_window) if window is None]
        num_away = 0
        for column, key in enumerate(keys):
            for number, pages in whole:
                if key not in pages:
                    num_away += 1
                    if num_away > self._host.most_copies or (number, key) not in self._host:
                        return column
        return len(keys)

    def _last_missing(self, keys: Sequence[bytes], count: int) -> int | None:
        """The last column that a beginning of so many needs and some set with a window has not."""
        bounded = [
            (number, pages, self._first_needed(window, count))
            for number, (pages, window) in enumerate(self._by_window)
            if window is not None
        ]
        for column in range(count - 1, min((first for *_, first in bounded), default=count) - 1, -1):
            key = keys[column]
            if any(
                column >= first and key not in pages and (number, key) not in self._host
                for number, pages, first in bounded
            ):
                return column
        return None

    def _forget(self, page: int) -> None:
        name = of_set, key = self._keys.pop(page)
        del self._pages[of_set][key]
        if self._host:
            self._evicted.append((name, page))
