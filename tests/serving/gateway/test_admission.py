import heapq
import itertools
import random

import pytest

from serving.errors import DeadlineExceeded, InvalidRequest, Overloaded, ReplicaUnavailable
from serving.gateway.admission import Admission


def test_one_more_than_the_limit_is_refused_with_the_number():
    admission = Admission(max_queued=2)
    admission.enter()
    admission.enter()
    with pytest.raises(Overloaded, match="2 answers are in flight") as refused:
        admission.enter()
    assert refused.value.retry_after_s >= 1
    admission.leave()
    admission.enter()


def test_several_answers_need_as_many_places():
    admission = Admission(max_queued=4)
    admission.enter(3)
    with pytest.raises(Overloaded):
        admission.enter(2)
    admission.leave(3)
    admission.enter(4)
    with pytest.raises(InvalidRequest, match="n is 5"):
        admission.enter(5)


def test_a_deadline_that_the_queue_makes_impossible_is_refused_now():
    admission = Admission(max_queued=100)
    for _ in range(9):
        admission.enter(slots=2, deadline_s=10.0)
    with pytest.raises(DeadlineExceeded, match=r"7 answers wait already, about 4.0 s, and deadline_ms is 3,900"):
        admission.enter(slots=2, deadline_s=3.9)
    assert admission.num_in_flight == 9
    admission.enter(slots=2, deadline_s=4.1)


def test_a_refusal_further_on_says_nothing_about_the_rate():
    now = [0.0]
    admission = Admission(max_queued=10, clock=lambda: now[0])
    for _ in range(1000):
        admission.enter()
        now[0] += 0.001
        admission.leave(served=False)
    for _ in range(10):
        admission.enter()
    assert admission.plan_return(1) > 9


def serve_burst(max_queued, slots, answer_s, burst, retries=2):
    """Clients that come at once and obey Retry-After, `retries` times; returns how many saw an error."""
    now, events, numbers = [0.0], [], itertools.count()
    random_numbers = random.Random(1)
    admission = Admission(max_queued, clock=lambda: now[0])
    waiting = running = failed = 0

    def at(time_s, what, tries=0):
        heapq.heappush(events, (time_s, next(numbers), what, tries))

    for _ in range(5):
        at(0.0, "come")
    for _ in range(burst):
        at(20 * answer_s, "come")
    while events:
        now[0], _, what, tries = heapq.heappop(events)
        if what == "end":
            admission.leave()
            running -= 1
        else:
            try:
                admission.enter(slots=slots)
                waiting += 1
            except Overloaded as error:
                failed += tries == retries
                if tries < retries:
                    at(now[0] + error.retry_after_s, "come", tries + 1)
        while waiting and running < slots:
            waiting, running = waiting - 1, running + 1
            at(now[0] + answer_s * random_numbers.uniform(0.5, 1.5), "end")
    assert admission.num_in_flight == 0
    return failed


@pytest.mark.parametrize(
    ("max_queued", "slots", "answer_s"), [(8, 4, 0.1), (8, 8, 0.5), (64, 8, 0.1), (64, 16, 0.5), (128, 64, 1.0)]
)
def test_a_burst_of_ten_times_the_capacity_is_served_within_two_retries(max_queued, slots, answer_s):
    assert serve_burst(max_queued, slots, answer_s, 10 * max_queued) == 0


async def test_draining_refuses_and_empties():
    admission = Admission(max_queued=2)
    admission.enter()
    admission.drain()
    with pytest.raises(ReplicaUnavailable, match="shutting down"):
        admission.enter()
    assert not await admission.emptied(0.01)
    admission.leave()
    assert await admission.emptied(1)
