"""How long a queue takes, and when the refused should come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.gateway.queue_time import MAX_RETRY_AFTER_S, DrainRate, expected_wait_s, plan_return


def rate_after(*, idle_s=0.0, answers_per_s=0.0, busy_slots=0, slots=1):
    rate = DrainRate()
    rate.pass_time(0.0, 0)
    for tenth in range(1, 301):
        rate.pass_time(tenth / 10, busy_slots)
        rate.end(answers_per_s / 10)
    rate.pass_time(30 + idle_s, 0)
    return rate.per_second(slots)


def test_the_rate_is_what_was_seen_lately():
    assert rate_after(answers_per_s=8, busy_slots=4, slots=4) == pytest.approx(8, rel=0.05)


def test_more_slots_than_were_busy_are_expected_to_do_as_well():
    assert rate_after(answers_per_s=2, busy_slots=1, slots=4) == pytest.approx(8, rel=0.05)


def test_a_quiet_hour_teaches_nothing():
    assert rate_after(answers_per_s=8, busy_slots=4, slots=4, idle_s=3600) == pytest.approx(8, rel=0.05)


def test_an_answer_a_second_is_the_first_guess():
    assert DrainRate().per_second(3) == 3


def test_where_nothing_ends_the_wait_is_the_longest():
    stuck = rate_after(busy_slots=4, slots=4)
    assert plan_return(0.0, 1, 10, stuck, 100, 0.0)[0] == MAX_RETRY_AFTER_S


def test_a_queue_takes_its_length_over_the_rate():
    assert expected_wait_s(12, 4.0) == 3.0


@pytest.mark.parametrize(("waiting", "rate", "wait_s"), [(0, 100, 1), (10, 4, 3), (12, 4, 4), (1000, 10, 30)])
def test_the_first_refused_comes_when_the_queue_is_worked_off(waiting, rate, wait_s):
    assert plan_return(50.0, 1, waiting, rate, 1000, 0.0)[0] == wait_s


def test_those_refused_after_come_back_after():
    until, waits = 0.0, []
    for _ in range(40):
        wait_s, until = plan_return(0.0, 1, 10, 10.0, 100, until)
        waits.append(wait_s)
    assert waits == sorted(waits)
    assert all(waits.count(wait_s) <= 10 for wait_s in set(waits)), "no second gets more than the rate"


@given(
    now_s=st.floats(0, 1e6),
    answers=st.integers(1, 16),
    waiting=st.integers(0, 10**6),
    rate=st.floats(1e-3, 1e6),
    max_queued=st.integers(1, 10**5),
    ahead_s=st.floats(-1e6, 100),
)
def test_it_is_always_whole_seconds_within_bounds(now_s, answers, waiting, rate, max_queued, ahead_s):
    wait_s, until_s = plan_return(now_s, answers, waiting, rate, max_queued, now_s + min(ahead_s, MAX_RETRY_AFTER_S))
    assert isinstance(wait_s, int)
    assert 1 <= wait_s <= MAX_RETRY_AFTER_S
    assert now_s <= until_s <= now_s + MAX_RETRY_AFTER_S
