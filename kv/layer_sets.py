"""LayerSets: which layers have their pages in common. Imports no JAX.

A page is one place in the page arrays, for all layers of one *set*. A set's layers have the same window, so what falls
out of it is given back for all of them, while sets that see everything keep theirs. All sets have equally many layers,
so that any page can be any set's: there is one pool of pages, one allocator, and no share of memory is fixed for any
kind of layer. A sequence has a row of pages per set.

Where all layers have one window or none, or where no text outgrows it, all layers are one set, and nothing is different
from there being none.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from kv.page_table import pages_for

Windows = tuple[int | None, ...]
"""Of each set; None where its layers see everything. One set without a window is `WHOLE`."""

WHOLE: Windows = (None,)
_SET_COST = 0.01  # of all pages: what a set costs beside them, since its page rows go up with every step


@dataclass(frozen=True, slots=True)
class LayerSets:
    """Two or more. With stages, those of one stage's layers, which are alike in all stages."""

    size: int
    """Layers of each set, in one stage; of the last set of a window some may be missing."""
    windows: Windows
    set_of_layer: tuple[int, ...]
    place_of_layer: tuple[int, ...]
    """Which of its set's layers it is."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How much of a sequence its pages reach over, in each set. A *column* is the pages of the same tokens, one in each
    set; of one set it is a page."""

    windows: Windows
    page_size: int
    tokens_ahead: int
    """Tokens that may have pages beyond those that a step wrote which has been read; see `tokens_ahead`."""

    @property
    def num_sets(self) -> int:
        return len(self.windows)

    @property
    def is_bounded(self) -> bool:
        """Whether pages ever fall out of a window."""
        return any(window is not None for window in self.windows)

    def first_seen(self, window: int | None, num_tokens: int) -> int:
        """The first column that tokens from this position on see."""
        return 0 if window is None else max(num_tokens + 1 - window, 0) // self.page_size

    def most(self, window: int | None, num_columns: int) -> int:
        """Columns that a sequence of `num_columns` has pages for at once in a set with this window."""
        if window is None:
            return num_columns
        return min(num_columns, pages_for(window + self.tokens_ahead, self.page_size) + 1)

    def num_held(self, num_tokens: int) -> int:
        """Pages of all sets that a sequence of so many tokens has at once, at most."""
        columns = pages_for(num_tokens, self.page_size)
        return sum(self.most(window, columns) for window in self.windows)

    def longest(self, num_pages: int, max_tokens: int) -> int:
        """Tokens of the longest sequence that so many pages hold, at most `max_tokens`."""
        if self.num_held(max_tokens) <= num_pages:
            return max_tokens
        columns = num_pages // self.num_sets  # that surely fit
        while self.num_held((columns + 1) * self.page_size) <= num_pages:
            columns += 1
        return columns * self.page_size


def tokens_ahead(chunk_tokens: int, max_trips: int, max_drafts: int) -> int:
    """A step is planned while another one is in flight, so two may have pages that no step was read of; and the first
    token of an answer."""
    return 2 * max(chunk_tokens, max_trips, max_drafts + 1) + 1


def choose_sets(
    windows: Sequence[int | None], max_tokens: int, page_size: int, num_stages: int = 1
) -> LayerSets | None:
    """Sets with which sequences of `max_tokens` hold the least, and few of them; None where one set does.

    `windows` are those of all layers, or empty. Small sets waste no place, but there are many of them.
    """
    if len({*windows}) < 2 or not are_alike(windows, num_stages):
        return None
    here = tuple(windows[: len(windows) // num_stages])
    kinds = {window: here.count(window) for window in here}
    reach, columns = Reach((*kinds,), page_size, 0), pages_for(max_tokens, page_size)
    held = {window: reach.most(window, columns) for window in kinds}

    def cost(size: int) -> tuple[float, int]:
        counts = {window: pages_for(count, size) for window, count in kinds.items()}
        pages = size * sum(count * held[window] for window, count in counts.items())
        return pages * (1 + _SET_COST * sum(counts.values())), size

    size = min(range(1, max(kinds.values()) + 1), key=cost)
    if cost(size)[0] >= len(here) * max(held.values()) * (1 + _SET_COST):
        return None
    return _sets_of(here, kinds, size)


def are_alike(windows: Sequence[int | None], num_stages: int) -> bool:
    """Whether stages have the same windows one after the other: else no set would be the same in all of them."""
    return tuple(windows[: len(windows) // num_stages]) * num_stages == tuple(windows)


def _sets_of(here: Windows, kinds: Iterable[int | None], size: int) -> LayerSets:
    """All sets of one window follow each other, those without one first."""
    layers = {window: [layer for layer, own in enumerate(here) if own == window] for window in kinds}
    ordered = sorted(layers, key=lambda window: (window is not None, window or 0))
    set_of, place_of, first = [0] * len(here), [0] * len(here), 0
    for window in ordered:
        for nth, layer in enumerate(layers[window]):
            set_of[layer], place_of[layer] = first + nth // size, nth % size
        first += pages_for(len(layers[window]), size)
    of_sets = chain.from_iterable(repeat(window, pages_for(len(layers[window]), size)) for window in ordered)
    return LayerSets(size, tuple(of_sets), tuple(set_of), tuple(place_of))
