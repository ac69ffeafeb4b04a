import pytest

from serving.errors import Overloaded, ReplicaUnavailable
from serving.gateway.admission import MAX_RETRY_AFTER_S, Admission


def test_one_more_than_the_limit_is_refused_with_the_number():
    admission = Admission(max_queued=2)
    admission.enter()
    admission.enter()
    with pytest.raises(Overloaded, match="2 requests are in flight") as refused:
        admission.enter()
    assert refused.value.retry_after_s == 1
    admission.leave(0.1)
    admission.enter()


@pytest.mark.parametrize(("duration_s", "num_in_flight", "wait_s"), [(100, 10, 10), (1, 100, 1), (10_000, 1, 60)])
def test_retry_after_is_when_a_place_should_be_free(duration_s, num_in_flight, wait_s):
    admission = Admission(max_queued=1000)
    for _ in range(200):
        admission.enter()
        admission.leave(duration_s)
    for _ in range(num_in_flight):
        admission.enter()
    assert admission.retry_after_s == wait_s <= MAX_RETRY_AFTER_S


async def test_draining_refuses_and_empties():
    admission = Admission(max_queued=2)
    admission.enter()
    admission.drain()
    with pytest.raises(ReplicaUnavailable, match="shutting down"):
        admission.enter()
    assert not await admission.emptied(0.01)
    admission.leave(1)
    assert await admission.emptied(1)
