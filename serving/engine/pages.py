"""SlotPages: the pages of running sequences. Joins pool, page table and prefix cache; reads for the planner, acts for
the engine. Owned by the engine's thread.

When may a page be published? A step that has been read has completed, and so have all before it. Published are only
full pages of tokens whose keys and values such steps wrote. A step in flight writes at later positions, hence in pages
that are not published: also when its sequence has ended or was preempted meanwhile, and its pages belong to others.
Pages of a prompt are published chunk by chunk, those of an answer when its sequence leaves the slot: decoding does no
hashing. And a sequence that starts with shared pages writes behind them: `match` leaves at least one token
to compute, in a page of its own.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kv.page_pool import PagePool
from kv.page_table import PageTable
from kv.prefix_cache import PrefixCache
from serving.engine.sequence import NO_SLOT, Sequence


@dataclass(frozen=True, slots=True)
class Match:
    """Cached pages with which a sequence can start."""

    pages: tuple[int, ...] = ()
    num_idle: int = 0
    """How many of them nobody holds: sharing these takes them from `num_free`."""


class SlotPages:
    def __init__(
        self, pool: PagePool, cache: PrefixCache, table: PageTable, page_size: int, window: int | None = None
    ) -> None:
        """`window` is the longest of all layers, None where some layer has none."""
        self._pool = pool
        self._cache = cache
        self._table = table
        self._page_size = page_size
        self._window = window
        self._drafted_P: NDArray[np.bool_] = np.zeros(pool.num_usable + 1, np.bool_)
        """Whether the draft model has read what lies in a page; true of published pages, the others say nothing."""

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_pages_B(self) -> NDArray[np.int32]:
        return self._table.num_pages_B

    @property
    def enabled(self) -> bool:
        return self._cache.enabled

    def will_share(self, sequence: Sequence) -> bool:
        """Whether it has yet to publish full pages of its prompt, with which others could start."""
        return self._cache.enabled and sequence.num_published < (sequence.num_prompt - 1) // self._page_size

    def match(self, sequence: Sequence) -> Match:
        """The longest cached beginning of a waiting sequence. Reads only."""
        if not self._cache.enabled:
            return Match()
        full = sequence.num_shareable // self._page_size
        pages = self._cache.match(sequence.keys.first(sequence.token_ids, full))
        return Match(pages, self._pool.count_idle(pages))

    def num_releasable(self, sequence: Sequence) -> int:
        """Pages that preempting this one sequence surely gives back: those that it shares with nobody. Reads only."""
        return self._pool.count_sole(self._table.pages(sequence.slot))

    def share(self, sequence: Sequence, pages: Items[int]) -> None:
        """Start a sequence, which has a slot and no pages yet, with cached pages."""
        self._pool.share(pages)
        self._table.append(sequence.slot, pages)
        sequence.num_published = len(pages)
        sequence.num_scheduled = len(pages) * self._page_size
        num_drafted = int(np.logical_and.accumulate(self._drafted_P[list(pages)]).sum())
        sequence.num_drafted = num_drafted * self._page_size

    def add(self, sequence: Sequence, count: int) -> None:
        self._table.append(sequence.slot, self._pool.allocate(count))

    def grow(self, slots: NDArray[np.intp]) -> None:
        """One page for each of these slots, which are rising and may be repeated."""
        if len(slots):
            self._table.append_each(slots, self._pool.allocate(len(slots)))

    def publish(self, sequence: Sequence, num_written: int) -> None:
        """Tokens before `num_written` are in pages, of a step that has completed; ignored without a slot: the pages
        are not the sequence's any more."""
        count = num_written // self._page_size
        if sequence.slot == NO_SLOT or count <= sequence.num_published or not self._cache.enabled:
            return
        start = sequence.num_published
        keys = sequence.keys.first(sequence.token_ids, count, start)
        pages = self._table.pages(sequence.slot, start, count)
        self._cache.publish(keys, pages)
        self._drafted_P[pages] = np.arange(start + 1, count + 1) * self._page_size <= sequence.num_drafted
        sequence.num_published = count

    def may_trim(self, num_tokens_B: NDArray[np.int32]) -> NDArray[np.intp]:
        """Slots that `trim` may take pages from when they have so many tokens, read or not."""
        if self._window is None:
            return np.zeros(0, np.intp)
        return np.flatnonzero((num_tokens_B - self._window) // self._page_size > self._table.num_trimmed_B)

    def trim(self, sequence: Sequence, num_written: int) -> None:
        """Give back pages before the window of all tokens to come, when tokens before `num_written` are in pages, of a
        step that has completed. They are published first: as long as nobody needs their room, others find them."""
        if self._window is None or sequence.slot == NO_SLOT:
            return
        count = max(num_written + 1 - self._window, 0) // self._page_size
        if count > self._table.num_trimmed_B[sequence.slot]:
            self.publish(sequence, num_written)
            self._pool.release(reversed(self._table.trim(sequence.slot, count)))

    def note_drafted(self, sequence: Sequence, num_tokens: int) -> None:
        """The draft model has read so many tokens of a running sequence, or does so before anything else runs."""
        full = slice(sequence.num_drafted // self._page_size, num_tokens // self._page_size)
        self._drafted_P[self._table.pages(sequence.slot, full.start, full.stop)] = True
        sequence.num_drafted = num_tokens

    def release(self, sequence: Sequence) -> None:
        """Last page first, so that the cache loses the end of a text before its beginning."""
        self._pool.release(reversed(self._table.clear(sequence.slot)))
        sequence.num_published = sequence.num_scheduled = sequence.num_drafted = 0

    def check_integrity(self) -> None:
        """Assert that every page has its owners, and that free slots own none."""
        self._pool.check_integrity(self._table.held_pages())
        self._cache.check_integrity()
