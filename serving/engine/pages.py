"""SlotPages: the pages of running sequences. Joins pool, page table and prefix cache; reads for the planner, acts for
the engine. Owned by the engine's thread.

When may a page be published? A step that has been read has completed, and so have all before it. Published are only
full pages of tokens whose keys and values such steps wrote. A step in flight writes at later positions, hence in pages
that are not published: also when its sequence has ended or was preempted meanwhile, and its pages belong to others.
Pages of a prompt are published chunk by chunk, those of an answer when its sequence leaves the slot: decoding does no
hashing. And a sequence that starts with shared pages writes behind them: `match` leaves at least one token
to compute, in a page of its own.

In sets of layers that have a window (`kv.layer_sets`) a sequence gives pages back as they fall out of it. Of a long
prompt it gets only as many there, when it is admitted, as it ever has at once; those that are to come follow chunk by
chunk (`fill`), as others fall out.

Pages of a beginning that lie in the host's memory (`kv.host_pages`) get new pages, and are published at once: they are
copied before the next step is dispatched (`take_copies`), and no other program reads them before that.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kv.host_pages import NO_COPIES, HostPages, PageArrays, PageCopies
from kv.layer_sets import Reach
from kv.page_pool import PagePool
from kv.page_table import PageTable, pages_for
from kv.prefix_cache import AWAY, NONE_FOUND, Beginning, PrefixCache
from serving.engine.sequence import NO_SLOT, Sequence


@dataclass(frozen=True, slots=True)
class Match:
    """Cached pages with which a sequence can start."""

    beginning: Beginning = NONE_FOUND
    num_idle: int = 0
    """How many of them nobody holds: sharing these takes them from `num_free`."""

    @property
    def num_columns(self) -> int:
        return self.beginning.num_columns

    @property
    def num_columns_away(self) -> int:
        """Columns that come back from the host's memory: of the first set, which sees the most."""
        return sum(of_set.count(AWAY) for of_set in self.beginning.pages[:1])


class SlotPages:
    def __init__(
        self, pool: PagePool, cache: PrefixCache, table: PageTable, reach: Reach, host: HostPages | None = None
    ) -> None:
        """`host` is the second tier of `cache`, if it has one."""
        self._pool = pool
        self._cache = cache
        self.host = HostPages() if host is None else host
        self._back: list[tuple[int, PageArrays]] = []
        self._table = table
        self._reach = reach
        self._page_size = reach.page_size
        self._bounded = [(number, window) for number, window in enumerate(reach.windows) if window is not None]
        self._unlike = [(number, window) for window, number in {w: n for n, w in self._bounded}.items()]
        """One set of each window: others of that window have as many pages."""
        self._drafted_P: NDArray[np.bool_] = np.zeros(pool.num_usable + 1, np.bool_)
        """Whether the draft model has read what lies in a page; true of published pages, the others say nothing."""

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_sets(self) -> int:
        return self._reach.num_sets

    @property
    def num_copies_back(self) -> int:
        return self.host.num_copies_back

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
        found = self._cache.match(sequence.keys.first(sequence.token_ids, full))
        return Match(found, self._pool.count_idle(found.all_pages))

    def num_new(self, num_columns: int, match: Match) -> int:
        """Pages to allocate, beside those that it shares, for a waiting sequence of so many columns. Reads only."""
        return match.beginning.num_away + sum(self._new_of_sets(num_columns, match.beginning))

    def num_to_fill(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages that are still to come before a prefilling sequence can go on by so many tokens. Reads only."""
        end = self._end_of(sequence, num_tokens)
        return sum(max(end - self._table.num_filled(sequence.slot, number), 0) for number, _ in self._bounded)

    def num_releasable(self, sequence: Sequence) -> int:
        """Pages that preempting this one sequence surely gives back: those that it shares with nobody. Reads only."""
        return self._pool.count_sole(self._table.all_pages(sequence.slot))

    def share(self, match: Match) -> None:
        """Hold the cached pages that are on the device, with which a sequence is going to start."""
        self._pool.share(match.beginning.all_pages)

    def start(self, sequence: Sequence, match: Match, num_columns: int) -> None:
        """Give a sequence, which has a slot and no pages yet, what it shares and behind it what `num_new` says."""
        count, of_sets = match.num_columns, match.beginning.pages or ((),) * self.num_sets
        self._table.append(sequence.slot, num_columns)
        for number, num_new in enumerate(self._new_of_sets(num_columns, match.beginning)):
            self._table.skip(sequence.slot, count - len(of_sets[number]), number)
            pages = [*self._brought_back(sequence, count, of_sets[number], number), *self._pool.allocate(num_new)]
            self._table.fill(sequence.slot, pages, number)
        sequence.num_published = count
        sequence.num_scheduled = count * self._page_size
        drafted = self._drafted_P[self._table.pages(sequence.slot, end=count)]
        sequence.num_drafted = int(np.logical_and.accumulate(drafted).sum()) * self._page_size

    def fill(self, sequence: Sequence, num_tokens: int) -> None:
        """What `num_to_fill` says."""
        end = self._end_of(sequence, num_tokens)
        for number, _ in self._bounded:
            count = end - self._table.num_filled(sequence.slot, number)
            if count > 0:
                self._table.fill(sequence.slot, self._pool.allocate(count), number)

    def grow(self, slots: NDArray[np.intp]) -> None:
        """One column for each of these slots, which are rising and may be repeated."""
        if len(slots):
            self._table.append_each(slots, self._pool.allocate(len(slots) * self.num_sets))

    def publish(self, sequence: Sequence, num_written: int) -> None:
        """Tokens before `num_written` are in pages, of a step that has completed; ignored without a slot: the pages
        are not the sequence's any more."""
        count = num_written // self._page_size
        if sequence.slot == NO_SLOT or count <= sequence.num_published or not self._cache.enabled:
            return
        start = sequence.num_published
        keys = sequence.keys.first(sequence.token_ids, count, start)
        for number in range(self.num_sets):
            self._cache.publish(keys, self._table.pages(sequence.slot, start, count, number), number)
        pages = self._table.pages(sequence.slot, start, count)
        self._drafted_P[pages] = np.arange(start + 1, count + 1) * self._page_size <= sequence.num_drafted
        sequence.num_published = count

    def may_trim(self, num_tokens_B: NDArray[np.int32]) -> NDArray[np.intp]:
        """Slots that `trim` may take pages from when they have so many tokens, read or not."""
        if not self._unlike:
            return np.zeros(0, np.intp)
        trimmed_WB = self._table.num_trimmed_WB
        may_B = [(num_tokens_B - window) // self._page_size > trimmed_WB[number] for number, window in self._unlike]
        return np.flatnonzero(np.logical_or.reduce(may_B))

    def trim(self, sequence: Sequence, num_written: int) -> None:
        """Give back pages before the window of all tokens to come, when tokens before `num_written` are in pages, of a
        step that has completed. They are published first: as long as nobody needs their room, others find them."""
        if sequence.slot == NO_SLOT:
            return
        for number, window in self._bounded:
            count = self._reach.first_seen(window, num_written)
            if count > self._table.num_trimmed_WB[number, sequence.slot]:
                self.publish(sequence, num_written)
                self._pool.release(reversed(self._table.trim(sequence.slot, count, number)))

    def note_drafted(self, sequence: Sequence, num_tokens: int) -> None:
        """The draft model has read so many tokens of a running sequence, or does so before anything else runs."""
        full = slice(sequence.num_drafted // self._page_size, num_tokens // self._page_size)
        self._drafted_P[self._table.pages(sequence.slot, full.start, full.stop)] = True
        sequence.num_drafted = num_tokens

    def release(self, sequence: Sequence) -> None:
        """Last page first, so that the cache loses the end of a text before its beginning."""
        for pages in self._table.clear(sequence.slot):
            self._pool.release(reversed(pages))
        sequence.num_published = sequence.num_scheduled = sequence.num_drafted = 0

    def take_copies(self) -> PageCopies:
        """What `start` and all that was allocated since the last call ask for; to be called before each step."""
        if not self.host:
            return NO_COPIES
        back, self._back = tuple(self._back), []
        return PageCopies(self.host.choose(self._cache.take_evicted()), back)

    def check_integrity(self) -> None:
        """Assert that every page has its owners, and that free slots own none."""
        self._table.check_integrity(self._reach.most(w, self._table.pages_per_slot) for w in self._reach.windows)
        self._pool.check_integrity(self._table.held_pages())
        self._cache.check_integrity()
        self.host.check_integrity()

    def _brought_back(self, sequence: Sequence, num_columns: int, pages: tuple[int, ...], of_set: int) -> Iterable[int]:
        """The last pages of a beginning of so many columns, with new ones in place of those that are away."""
        if AWAY not in pages:  # the usual case
            return pages
        keys = sequence.keys.first(sequence.token_ids, num_columns, num_columns - len(pages))
        names = [(of_set, key) for key, page in zip(keys, pages, strict=True) if page == AWAY]
        new = self._pool.allocate(len(names))
        self._back += zip(new, self.host.use(names), strict=True)
        self._drafted_P[new] = False
        self._cache.publish((key for _, key in names), new, of_set)
        rest = iter(new)
        return (next(rest) if page == AWAY else page for page in pages)

    def _new_of_sets(self, num_columns: int, shared: Beginning) -> list[int]:
        """Of each set. What it shares counts for what it may have at once."""
        rest = num_columns - shared.num_columns
        lengths = [len(pages) for pages in shared.pages] or [0] * self.num_sets
        return [
            rest if window is None else self._reach.most(window, rest + length) - length
            for window, length in zip(self._reach.windows, lengths, strict=True)
        ]

    def _end_of(self, sequence: Sequence, num_tokens: int) -> int:
        """The column before which it must have pages to go on by so many tokens, and one of its answer."""
        wanted = pages_for(sequence.num_scheduled + num_tokens + 1, self._page_size)
        return min(wanted, int(self._table.num_pages_B[sequence.slot]))
