"""How long a queue takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.gateway.admission.queue_time import (
    FIRST_GUESS,
    MAX_RETRY_AFTER_S,
    DrainRate,
    seconds_until,
    whole_seconds,
)


def tokens_per_slot_s(*, answer_s, slots=4, tokens=100, num_crowds=10, together=True, idle_s=0.0):
    """After crowds that fill all slots; an answer takes `answer_s`. They end together or one after another."""
    rate = DrainRate()
    rate.pass_time(0.0, 0)
    now_s = 0.0
    for _ in range(num_crowds):
        for _ in range(slots):
            now_s += 0 if together else answer_s / slots
            rate.pass_time(now_s, slots)
            if not together:
                rate.end(1, tokens, slots, slots)
        if together:
            now_s += answer_s
            rate.pass_time(now_s, slots)
            for running in range(slots, 0, -1):
                rate.end(1, tokens, running, slots)
    rate.pass_time(now_s + idle_s, 0)
    return rate.per_slot(running_tokens=0 if together else slots * tokens)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("answer_s", [0.5, 20])
def test_the_rate_is_what_was_seen_lately(answer_s, together):
    assert tokens_per_slot_s(answer_s=answer_s, together=together) == pytest.approx(100 / answer_s, rel=0.05)


def test_a_quiet_hour_teaches_nothing():
    assert tokens_per_slot_s(answer_s=2, idle_s=3600) == tokens_per_slot_s(answer_s=2)


def test_there_is_a_guess_before_the_first_answer_has_ended():
    rate = DrainRate()
    assert (rate.per_slot(1000), rate.known) == (FIRST_GUESS, 0)


def test_it_is_known_once_some_crowds_have_ended():
    rate = DrainRate()
    for _ in range(10 * 8):
        rate.end(1, 100, running=8, slots=8)
    assert rate.known > 0.9


def test_as_long_as_nothing_ends_what_runs_has_taken_that_long():
    """Four answers of 100 tokens run for 50 s: they take that long at least."""
    rate = DrainRate()
    rate.pass_time(0.0, 0)
    rate.pass_time(50.0, 4)
    assert rate.per_slot(4 * 100) == pytest.approx(100 / 50, rel=0.1)
    rate.pass_time(100.0, 4)
    assert rate.per_slot(4 * 100) == pytest.approx(100 / 100, rel=0.1)


def test_a_queue_takes_its_answers_over_the_rate():
    assert seconds_until(12, tokens=100, slots=4, per_slot=50) == 6.0
    assert seconds_until(-3, tokens=100, slots=4, per_slot=50) == 0.0


@given(wait_s=st.floats(0, 1e300))
def test_a_header_says_whole_seconds_within_bounds_and_rather_too_early(wait_s):
    told_s = whole_seconds(wait_s)
    assert isinstance(told_s, int)
    assert 1 <= told_s <= MAX_RETRY_AFTER_S
    assert told_s <= max(1, wait_s)


@given(
    steps=st.lists(st.tuples(st.floats(0, 1e3), st.integers(0, 8), st.integers(0, 3), st.integers(1, 256)), max_size=30)
)
def test_whatever_happens_there_is_a_rate(steps):
    rate, now_s = DrainRate(), 0.0
    for passed_s, busy, ended, tokens in steps:
        now_s += passed_s
        rate.pass_time(now_s, busy)
        rate.end(ended, tokens, max(busy, ended), slots=8)
        assert rate.per_slot(busy * tokens) > 0
        assert 0 <= rate.known <= 1
