"""Every page is free or owned, whatever happens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv.page_pool import NULL_PAGE, PagePool
from kv.page_table import PageTable, pages_for


def test_the_null_page_is_never_handed_out():
    pool = PagePool(5)
    assert NULL_PAGE not in pool.allocate(4)
    assert pool.num_free == 0 and pool.num_usable == 4


def test_a_shared_page_is_free_only_when_its_last_owner_lets_go():
    pool = PagePool(3)
    [page] = pool.allocate(1)
    pool.share([page])
    pool.release([page])
    assert pool.num_free == 1
    pool.check_integrity([page])
    pool.release([page])
    assert pool.num_free == 2


def test_releasing_twice_and_sharing_a_free_page_are_caught():
    pool = PagePool(3)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)
    with pytest.raises(AssertionError, match="is free and cannot be shared"):
        pool.share(pages)


def test_a_lost_page_is_found_by_the_integrity_check():
    pool = PagePool(3)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="1 owners, 0 hold it"):
        pool.check_integrity()


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 9)), max_size=60))
def test_any_history_keeps_the_pool_whole(history):
    pool, holders = PagePool(12), []
    for action, number in history:
        if action == "allocate" and number <= pool.num_free:
            holders.append(pool.allocate(number))
        elif action == "share" and holders:
            holders.append(list(holders[number % len(holders)]))
            pool.share(holders[-1])
        elif action == "release" and holders:
            pool.release(holders.pop(number % len(holders)))
        pool.check_integrity([page for pages in holders for page in pages])


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 6)), max_size=30))
def test_a_page_table_row_lists_its_pages_in_order_with_the_null_page_before_and_behind_them(history):
    table, expected, next_page = PageTable(num_slots=3, pages_per_slot=6), {0: [], 1: [], 2: []}, 1
    for slot, count, to_trim in history:
        if len(expected[slot]) + count > table.pages_per_slot:
            assert table.clear(slot) == held(expected[slot])
            expected[slot] = []
        pages = list(range(next_page, next_page + count))
        next_page += count
        table.append(slot, pages)
        expected[slot] += pages
        if table.num_trimmed_B[slot] <= to_trim <= len(expected[slot]):
            assert table.trim(slot, to_trim) == held(expected[slot][:to_trim])
            expected[slot][:to_trim] = [NULL_PAGE] * to_trim
    for slot, pages in expected.items():
        assert table.pages(slot) == held(pages) and table.num_pages_B[slot] == len(pages)
        assert table.page_indices_BJ[slot].tolist() == pages + [NULL_PAGE] * (6 - len(pages))
    assert sorted(table.held_pages()) == sorted(held([page for pages in expected.values() for page in pages]))


def held(pages):
    return [page for page in pages if page != NULL_PAGE]


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_for(tokens, pages):
    assert pages_for(tokens, page_size=4) == pages
