"""The prefix cache alone: what it finds is what was written, it finds the most, and it gives way when pages run out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv.host_pages import HostPages
from kv.layer_sets import Reach
from kv.page_keys import PageKeys
from kv.page_pool import PagePool
from kv.prefix_cache import AWAY, NONE_FOUND, PrefixCache

SIZE = 2
NUM_PAGES = 9


class Cached:
    """A cache with its pool, and beside it what was really written into each page."""

    def __init__(self, num_pages=NUM_PAGES):
        self.pool = PagePool(num_pages + 1)
        self.cache = PrefixCache(self.pool, Reach((None,), SIZE, 0))
        self.content = {}

    def run(self, tokens, salt=""):
        """Compute a sequence: share what is cached, write the rest, publish. Returns its pages, held, and the hits;
        None when there are not enough pages."""
        count = len(tokens) // SIZE
        keys = PageKeys(SIZE, salt).first(tokens, count)
        found = self.cache.match(keys).all_pages
        self.check_found(found, tokens, salt)
        if count - len(found) + self.pool.count_idle(found) > self.pool.num_free:
            return None
        self.pool.share(found)
        new = self.pool.allocate(count - len(found))
        for index, page in enumerate(new, start=len(found) + 1):
            self.content[page] = salt, tuple(tokens[: index * SIZE])
        self.cache.publish(keys, [*found, *new])
        return [*found, *new], len(found)

    def check_found(self, found, tokens, salt):
        prefixes = [(salt, tuple(tokens[: i * SIZE])) for i in range(1, len(tokens) // SIZE + 1)]
        assert [self.content[page] for page in found] == prefixes[: len(found)], "a page holds something else"
        published = {self.content[page] for page in self.pool.kept_pages}
        assert prefixes[len(found) : len(found) + 1] == [] or prefixes[len(found)] not in published, "one was missed"

    def release(self, pages):
        self.pool.release(reversed(pages))


def test_a_second_run_shares_the_pages_of_the_first():
    cached = Cached()
    pages, _ = cached.run([1, 2, 3, 4])
    assert cached.run([1, 2, 3, 4, 5, 6]) == ([*pages, pages[-1] + 1], 2)
    cached.pool.check_integrity([*pages, *pages, pages[-1] + 1])


def test_pages_stay_after_their_last_release_and_count_as_free():
    cached = Cached()
    pages, _ = cached.run([1, 2, 3, 4])
    cached.release(pages)
    assert (cached.pool.num_free, cached.pool.num_idle) == (NUM_PAGES, 2)
    assert cached.run([1, 2, 3, 4])[0] == pages
    assert (cached.pool.num_free, cached.pool.num_idle) == (NUM_PAGES - 2, 0)


def test_free_pages_go_first_then_the_end_of_the_text_used_longest_ago():
    cached = Cached(num_pages=6)
    for tokens in ([1, 1, 1, 2], [2, 1, 2, 2], [1, 1, 1, 2]):  # the first is used again
        cached.release(cached.run(tokens)[0])
    cached.pool.allocate(2)
    assert cached.cache.num_pages == 4
    cached.pool.allocate(1)
    found = [cached.cache.match(PageKeys(SIZE).first(t, 2)) for t in ([1, 1, 1, 2], [2, 1, 2, 2])]
    assert [one.pages for one in found] == [((1, 2),), ((3,),)]
    cached.cache.check_integrity()


def test_salts_share_nothing():
    cached = Cached()
    assert cached.run([1, 2], "a")[1] == 0 == cached.run([1, 2], "b")[1]
    assert cached.run([1, 2], "a")[1] == 1


def test_the_same_tokens_at_another_place_are_another_page():
    cached = Cached()
    cached.run([1, 2, 1, 2])
    assert cached.run([1, 2, 1, 2, 1, 2])[1] == 2
    assert cached.cache.num_pages == 3


def test_a_cache_that_is_off_finds_nothing_and_keeps_nothing():
    pool = PagePool(5)
    cache = PrefixCache(pool, Reach((None,), SIZE, 0), enabled=False)
    keys = PageKeys(SIZE).first([1, 2], 1)
    pages = pool.allocate(1)
    cache.publish(keys, pages)
    pool.release(pages)
    assert cache.match(keys) == NONE_FOUND and pool.num_idle == 0


def test_clear_forgets_held_and_idle_pages():
    cached = Cached()
    held, _ = cached.run([1, 2])
    cached.release(cached.run([3, 4])[0])
    cached.cache.clear()
    assert cached.pool.num_idle == 0 and cached.run([1, 2])[1] == 0
    cached.cache.check_integrity()
    cached.release(held)
    assert cached.pool.num_idle == 0


def test_keys_grow_with_the_tokens_and_refuse_pages_that_are_not_full():
    keys, tokens = PageKeys(SIZE), [1, 2, 3]
    first = keys.first(tokens, 1)
    tokens.append(4)
    assert keys.first(tokens, 2) == PageKeys(SIZE).first((1, 2, 3, 4), 2) == [*first, keys.first(tokens, 2)[1]]
    with pytest.raises(AssertionError, match="4 tokens do not fill 3 pages"):
        keys.first(tokens, 3)


def test_adapters_have_no_keys_in_common_whatever_the_salt():
    tokens = list(range(SIZE))
    keys = [
        PageKeys(SIZE, salt, adapter).first(tokens, 1)[0]
        for salt in ("", "1", "11\0")
        for adapter in (0, 1, 11, 10**12)
    ]
    assert len({*keys}) == len(keys)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=10), st.sampled_from(["", "x"]), st.integers(0, 9)),
        max_size=60,
    )
)
def test_any_history_finds_the_most_and_only_what_was_written(history):
    """Few tokens and few pages, so that texts meet and pages run out. A number below 6 ends a sequence first."""
    cached, running = Cached(), []
    for tokens, salt, number in history:
        if running and number < 6:
            cached.release(running.pop(number % len(running)))
        if (started := cached.run(tokens, salt)) is not None:
            running.append(started[0])
        cached.pool.check_integrity([page for pages in running for page in pages])
        cached.cache.check_integrity()


@given(
    st.lists(st.sampled_from([None, 1, 3, 6]), min_size=1, max_size=3),
    st.integers(0, 8),
    st.sets(st.tuples(st.integers(0, 2), st.integers(0, 7))),
)
def test_layers_with_a_window_need_the_end_of_a_beginning_only(windows, count, missing):
    """Any pages may be missing: found is the longest beginning of which every set has what the next token sees."""
    pool = PagePool(1 + 8 * len(windows))
    cache = PrefixCache(pool, Reach(tuple(windows), SIZE, 0))
    keys = PageKeys(SIZE).first(range(8 * SIZE), 8)
    pages = [pool.allocate(8) for _ in windows]
    for of_set, own in enumerate(pages):
        columns = [column for column in range(8) if (of_set, column) not in missing]
        cache.publish([keys[column] for column in columns], [own[column] for column in columns], of_set)

    def seen(window, length):
        """Columns that the token behind `length` columns sees."""
        first = 0 if window is None else max(length * SIZE - window + 1, 0)
        return {position // SIZE for position in range(first, length * SIZE)}

    def is_there(length):
        return all((s, column) not in missing for s, window in enumerate(windows) for column in seen(window, length))

    found = cache.match(keys[:count])
    assert found.num_columns == max(length for length in range(count + 1) if is_there(length))
    expected = [
        tuple(own[c] for c in sorted(seen(w, found.num_columns))) for own, w in zip(pages, windows, strict=True)
    ]
    assert found.pages == (tuple(expected) if found.num_columns else ())
    cache.check_integrity()


@given(
    st.lists(st.sampled_from([None, 1, 3, 6]), min_size=1, max_size=3),
    st.dictionaries(st.tuples(st.integers(0, 2), st.integers(0, 7)), st.sampled_from(["host", "nowhere"])),
    st.integers(0, 20),
)
def test_a_beginning_may_be_away_in_part_but_no_more_of_it_than_can_come_back_at_once(windows, elsewhere, most):
    host, pool = HostPages(100, 100), PagePool(1 + 8 * len(windows))
    cache = PrefixCache(pool, Reach(tuple(windows), SIZE, 0), host=host)
    keys = PageKeys(SIZE).first(range(8 * SIZE), 8)
    pages = [pool.allocate(8) for _ in windows]
    for (of_set, column), where in elsewhere.items():
        if where == "host":
            host.put((of_set, keys[column]), ())
    for of_set, own in enumerate(pages):
        here = [column for column in range(8) if (of_set, column) not in elsewhere]
        cache.publish([keys[column] for column in here], [own[column] for column in here], of_set)
    host._most_copies = most

    def needed(length):
        """Of each set, the columns that the token behind `length` columns sees."""
        return [range(0 if w is None else max(length * SIZE - w + 1, 0) // SIZE, length) for w in windows]

    def where(length):
        return [elsewhere.get((s, column)) for s, columns in enumerate(needed(length)) for column in columns]

    found = cache.match(keys)
    longest = max(n for n in range(9) if "nowhere" not in where(n) and where(n).count("host") <= most)
    assert found.num_columns == longest and found.num_away == where(longest).count("host")
    for own, columns, of_set in zip(pages, needed(longest), found.pages, strict=False):
        assert all(page in (AWAY, own[column]) for page, column in zip(of_set, columns, strict=True))
