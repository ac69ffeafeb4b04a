"""The second tier alone: which pages are in the host's memory, which have left it, and how many are on their way."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kv.host_pages import HostPages

NAMES = [(number, b"key") for number in range(8)]


class OnDevice:
    """An array that tells whether it was taken to the host."""

    def __init__(self, number):
        self.number, self.is_taken = number, False

    def __array__(self, dtype=None, copy=None):
        self.is_taken = True
        return np.asarray(self.number)


def evict(host, numbers):
    """What is copied out, by its number."""
    chosen = host.choose([(NAMES[number], number) for number in numbers])
    for name, page in chosen:
        host.put(name, (OnDevice(page),))
    return [page for _, page in chosen]


def step(host):
    host.dispatched()
    host.read()


def test_without_room_nothing_is_ever_here():
    host = HostPages()
    assert not host and evict(host, [1, 2]) == [] and NAMES[1] not in host
    step(host)
    host.check_integrity()


def test_a_page_is_taken_to_the_host_when_a_step_behind_its_copy_was_read():
    host = HostPages(4, 4)
    evict(host, [1])
    array = host.use([NAMES[1]])[0][0]
    host.dispatched()
    host.dispatched()
    assert not array.is_taken, "what is on its way can come back from where it still lies"
    host.read()
    assert array.is_taken and isinstance(host.use([NAMES[1]])[0][0], np.ndarray)


def test_no_more_copies_are_on_their_way_than_agreed_and_the_end_of_a_text_is_lost_first():
    host = HostPages(8, 3)
    assert evict(host, [4, 3, 2, 1]) == [3, 2, 1]
    host.dispatched()
    assert evict(host, [6, 5]) == []
    host.use(NAMES[1:3])
    assert host.num_copies_back == 1
    host.dispatched()
    assert host.num_copies_back == 1
    assert host.read()
    assert evict(host, [6, 5]) == [6, 5] and host.num_copies_back == 1
    assert host.read()
    assert host.num_copies_back == 3


def test_the_time_of_a_step_with_copies_before_it_is_not_its_own():
    host = HostPages(2, 2)
    host.dispatched()
    evict(host, [1])
    host.dispatched()
    assert [host.read(), host.read()] == [False, True]


def test_what_came_back_and_is_evicted_again_need_not_be_copied():
    host = HostPages(2, 2)
    evict(host, [1])
    step(host)
    evict(host, [2])
    step(host)
    assert evict(host, [1]) == [] and evict(host, [3]) == [3]
    assert host.names == (NAMES[1], NAMES[3])


@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(["evict", "use", "step"]), st.permutations(range(8)), st.integers(0, 8))),
)
def test_the_page_used_longest_ago_gives_way(num_pages, most_copies, history):
    """Against a list, the one used longest ago first."""
    host, model, on_way = HostPages(num_pages, most_copies), [], 0
    for what, order, count in history:
        numbers = order[:count]
        if what == "evict":
            new = [number for number in numbers if number not in model]
            taken = new[max(len(new) - min(most_copies, num_pages) + on_way, 0) :]
            known = [number for number in numbers if number in model]
            assert evict(host, numbers) == taken
            model = [*(n for n in model if n not in known), *known, *taken][-num_pages:]
            on_way += len(taken)
        elif what == "use":
            numbers = [number for number in numbers if number in model][: host.num_copies_back]
            arrays = host.use([NAMES[number] for number in numbers])
            assert [getattr(array, "number", array) for (array,) in arrays] == numbers
            model = [*(n for n in model if n not in numbers), *reversed(numbers)]
        else:
            step(host)
            on_way = 0
        assert host.names == tuple(NAMES[number] for number in model) and len(host) <= num_pages
        host.check_integrity()
