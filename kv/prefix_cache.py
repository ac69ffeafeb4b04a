"""PrefixCache: which pages hold which beginning of a text, so that it is computed once. Host only.

A page is published under its key (`kv.page_keys`) when the step that filled it has completed. Whoever starts with the
same tokens shares the page: nothing is copied, since a full page is never written again. A published page without
owners stays in the pool as idle; when the pool needs it, it is evicted and its key forgotten.

A sequence releases its pages last first. So the end of a chain is evicted before its beginning, without which it could
not be found.
"""

from collections.abc import Iterable

from kv.page_pool import PagePool


class PrefixCache:
    """An index over the pool's kept pages. Owned by the engine's thread, as the pool is."""

    def __init__(self, pool: PagePool, *, enabled: bool = True) -> None:
        """A cache that is not enabled takes nothing and finds nothing."""
        self._pool = pool
        self._enabled = enabled
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        pool.listen(self._forget)

    @property
    def enabled(self) -> bool:
        return self._enabled

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    def match(self, keys: Iterable[bytes]) -> tuple[int, ...]:
        """Pages of the longest published beginning of the chain `keys`, in order. They are not held yet: share them
        before anything is allocated."""
        pages: list[int] = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            pages.append(page)
        return tuple(pages)

    def publish(self, keys: Iterable[bytes], pages: Iterable[int]) -> None:
        """Offer full pages, held by the caller and completely written, under their keys.

        Of two sequences that computed the same page the first one's stays; the other page is freed with its sequence.
        """
        if self._enabled:
            for key, page in zip(keys, pages, strict=True):
                if key not in self._pages:
                    self._pool.keep(page)
                    self._pages[key] = page
                    self._keys[page] = key

    def clear(self) -> None:
        """Forget everything: what lies in the pages is not to be trusted, or belongs to other weights."""
        self._pages.clear()
        self._keys.clear()
        self._pool.drop_kept()

    def check_integrity(self) -> None:
        """Assert that keys and pages name each other, and that the pool keeps exactly these pages."""
        assert {page: key for key, page in self._pages.items()} == self._keys, "keys and pages do not match"
        assert self._pool.kept_pages == self._keys.keys(), "the pool keeps other pages than the cache"

    def _forget(self, page: int) -> None:
        del self._pages[self._keys.pop(page)]
