"""When a step counts as stuck, and when it is given up."""

from hypothesis import given
from hypothesis import strategies as st

from serving.replica.step_watch import FIRST_S, LOST_S, TIMES_LONGEST, WATCH_S, StepWatch


def watched(*steps, stuck_s=10.0):
    """After steps of so many seconds each, of which the last still runs; idle for a look in between."""
    watch = StepWatch(stuck_s)
    for number, seconds in enumerate(steps, start=1):
        for second in range(1, seconds + 1):
            watch.look(number, float(second))
        if number < len(steps):
            watch.look(number, 0.0)
    return watch


def test_a_step_is_stuck_after_its_time_and_lost_after_more():
    assert not watched(1, 1, 10).is_stuck
    assert watched(1, 1, 11).is_stuck
    assert not watched(1, 1, 40).is_lost
    assert watched(1, 1, 10 + int(LOST_S) + 1).is_lost


def test_the_first_has_more_time_since_nobody_knows_how_long_one_takes():
    assert not watched(int(FIRST_S)).is_stuck
    assert watched(int(FIRST_S) + 1).is_stuck


def test_where_steps_take_long_they_may_take_long():
    assert not watched(1, 8, 8 * TIMES_LONGEST).is_stuck
    assert watched(1, 8, 8 * TIMES_LONGEST + 1).is_stuck


def test_a_machine_that_stood_still_makes_no_step_stuck():
    """Seen once, after an hour."""
    watch = watched(1, 1)
    watch.look(3, 3600.0)
    assert watch.seen_s == WATCH_S and not watch.is_stuck


def test_one_that_ends_after_all_is_forgotten():
    watch = watched(1, 1, 11)
    watch.look(3, 0.0)
    assert not watch.is_stuck
    watch.look(4, 0.5)
    assert not watch.is_stuck


@given(looks=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 100)), max_size=200))
def test_who_is_lost_is_stuck_and_no_step_was_seen_longer_than_it_ran(looks):
    watch, number = StepWatch(10.0), 0
    for more, took_s in looks:
        number += more
        watch.look(number, took_s)
        assert watch.seen_s <= took_s
        assert watch.is_stuck or not watch.is_lost
