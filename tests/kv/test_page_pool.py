"""Every page is free or owned, whatever happens."""

import numpy as np
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
            assert table.clear(slot) == [held(expected[slot])]
            expected[slot] = []
        pages = list(range(next_page, next_page + count))
        next_page += count
        table.append(slot, count)
        table.fill(slot, pages)
        table.check_integrity([6])
        expected[slot] += pages
        if table.num_trimmed_WB[0, slot] <= to_trim <= len(expected[slot]):
            assert table.trim(slot, to_trim) == held(expected[slot][:to_trim])
            expected[slot][:to_trim] = [NULL_PAGE] * to_trim
    for slot, pages in expected.items():
        assert table.pages(slot) == held(pages) and table.num_pages_B[slot] == len(pages)
        assert table.page_indices_WBJ[0, slot].tolist() == pages + [NULL_PAGE] * (6 - len(pages))
    assert sorted(table.held_pages()) == sorted(held([page for pages in expected.values() for page in pages]))


def test_each_set_has_rows_of_its_own_which_get_their_pages_in_time():
    table = PageTable(num_slots=2, pages_per_slot=6, num_sets=3)
    table.append(1, 4)
    table.skip(1, 1, of_set=2)
    for of_set, pages in enumerate(([1, 2, 3, 4], [5, 6], [7])):
        table.fill(1, pages, of_set)
    table.check_integrity([4, 2, 1])
    assert table.page_indices_WBJ[:, 1].tolist() == [[1, 2, 3, 4, 0, 0], [5, 6, 0, 0, 0, 0], [0, 7, 0, 0, 0, 0]]
    assert table.trim(1, 1, of_set=1) == [5]
    table.fill(1, [8, 9], of_set=1)
    table.fill(1, [10, 11], of_set=2)
    table.append_each(np.array([1, 1]), [12, 13, 14, 15, 16, 17])
    rows = [[1, 2, 3, 4, 12, 13], [0, 6, 8, 9, 14, 15], [0, 7, 10, 11, 16, 17]]
    assert table.page_indices_WBJ[:, 1].tolist() == rows
    table.check_integrity([6, 5, 5])
    with pytest.raises(AssertionError, match="beyond its window"):
        table.check_integrity([6, 4, 5])
    assert table.clear(1) == [held(row) for row in rows] and table.held_pages() == []


def held(pages):
    return [page for page in pages if page != NULL_PAGE]


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_for(tokens, pages):
    assert pages_for(tokens, page_size=4) == pages
