"""Requests that come in, wait at the door or are refused."""

import asyncio

import pytest

from serving.errors import DeadlineExceeded, InvalidRequest, Overloaded, ReplicaUnavailable
from serving.gateway.admission.admission import Admission
from serving.request import Request, SamplingParams, TextPrompt


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def asked(text="abc", *, answers=1, max_tokens=20):
    return Request(f"id of {text}", "m", TextPrompt(text), SamplingParams(max_tokens=max_tokens), num_choices=answers)


async def test_one_more_than_the_limit_is_refused_with_the_number():
    admission = Admission(max_queued=2)
    place = await admission.enter(asked())
    await admission.enter(asked())
    with pytest.raises(Overloaded, match="2 answers are in flight") as refused:
        await admission.enter(asked("d"))
    assert refused.value.retry_after_s >= 1
    admission.leave(place)
    await admission.enter(asked("e"))


async def test_several_answers_need_as_many_places():
    admission = Admission(max_queued=4)
    place = await admission.enter(asked(answers=3))
    with pytest.raises(Overloaded):
        await admission.enter(asked(answers=2))
    admission.leave(place)
    await admission.enter(asked("d", answers=4))
    with pytest.raises(InvalidRequest, match="n is 5"):
        await admission.enter(asked(answers=5))


async def test_who_comes_back_when_told_waits_for_a_place_and_leaves_it():
    clock = Clock()
    admission = Admission(max_queued=1, clock=clock)
    first = await admission.enter(asked("a"))
    with pytest.raises(Overloaded) as refused:
        await admission.enter(asked("b"))
    clock.now_s = refused.value.retry_after_s
    second = asyncio.create_task(admission.enter(asked("b")))
    await asyncio.sleep(0)
    assert not second.done()
    admission.leave(first)
    admission.leave(await second)
    assert admission.num_in_flight == 0
    assert await admission.emptied(1)


async def at_the_door(admission, clock, deadline_s=None):
    """The task of one who waits there behind one who runs, and that one's place."""
    running = await admission.enter(asked("runs", max_tokens=1))
    with pytest.raises(Overloaded) as refused:
        await admission.enter(asked("waits"))
    clock.now_s += refused.value.retry_after_s
    waiting = asyncio.create_task(admission.enter(asked("waits"), deadline_s=deadline_s))
    await asyncio.sleep(0)
    return waiting, running


@pytest.mark.parametrize("freed_first", [False, True])
async def test_who_goes_away_at_the_door_leaves_no_place_behind(freed_first):
    clock = Clock()
    admission = Admission(max_queued=1, clock=clock)
    waiting, running = await at_the_door(admission, clock)
    if freed_first:  # his place is his already, though he does not know it yet
        admission.leave(running)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    if not freed_first:
        admission.leave(running)
    assert admission.num_in_flight == 0
    await admission.enter(asked("d"))


async def test_a_deadline_passes_at_the_door():
    clock = Clock()
    admission = Admission(max_queued=1, clock=clock)
    waiting, running = await at_the_door(admission, clock, deadline_s=0.2)
    with pytest.raises(DeadlineExceeded, match="within deadline_ms, 200"):
        await waiting
    admission.leave(running)
    assert admission.num_in_flight == 0


async def test_draining_sends_away_those_at_the_door():
    clock = Clock()
    admission = Admission(max_queued=1, clock=clock)
    waiting, running = await at_the_door(admission, clock)
    admission.drain()
    with pytest.raises(ReplicaUnavailable, match="shutting down"):
        await waiting
    admission.leave(running)
    assert await admission.emptied(1)


async def test_a_deadline_that_the_queue_makes_impossible_is_refused_now():
    """Twenty tokens a second are guessed before anything has ended, so an answer of 20 takes one."""
    admission = Admission(max_queued=100)
    for _ in range(9):
        await admission.enter(asked(), slots=2, deadline_s=10.0)
    with pytest.raises(DeadlineExceeded, match=r"7 answers wait already, about 4.0 s, and deadline_ms is 3,900"):
        await admission.enter(asked(), slots=2, deadline_s=3.9)
    assert admission.num_in_flight == 9
    await admission.enter(asked(), slots=2, deadline_s=4.1)


async def test_a_refusal_further_on_says_nothing_about_the_rate():
    clock = Clock()
    admission = Admission(max_queued=10, clock=clock)
    for _ in range(1000):
        place = await admission.enter(asked())
        clock.now_s += 0.001
        admission.leave(place, served=False)
    for _ in range(10):
        await admission.enter(asked(max_tokens=200))
    with pytest.raises(DeadlineExceeded, match=r"about [0-9]{2,3}"):
        await admission.enter(asked(), deadline_s=9)


async def test_draining_refuses_and_empties():
    admission = Admission(max_queued=2)
    place = await admission.enter(asked())
    admission.drain()
    with pytest.raises(ReplicaUnavailable, match="shutting down"):
        await admission.enter(asked())
    assert not await admission.emptied(0.01)
    admission.leave(place)
    assert await admission.emptied(1)
