"""Who waits for whom when prompts are read."""

import asyncio
import threading

import pytest

from serving.errors import InvalidRequest, Overloaded
from serving.replica import lanes as lanes_module
from serving.replica.lanes import LONG_BYTES, Lanes
from tests.services import until

LONG = LONG_BYTES + 1


@pytest.fixture
async def lanes():
    made = Lanes()
    yield made
    made.close()


class Work:
    """Runs until it is told to end."""

    def __init__(self):
        self.started, self.end = threading.Event(), threading.Event()

    def __call__(self):
        self.started.set()
        assert self.end.wait(10)


async def test_long_ones_run_one_by_one_and_short_ones_beside_them(lanes):
    works = [Work() for _ in range(8)]
    running = [asyncio.create_task(lanes.run(work, LONG)) for work in works]
    await until(works[0].started.is_set)
    assert await asyncio.wait_for(lanes.run(lambda: "short", LONG_BYTES), 1) == "short"
    assert await asyncio.wait_for(lanes.run(lambda: "form", LONG_BYTES, grammar=True), 1) == "form"
    assert [work.started.is_set() for work in works] == [True, *[False] * 7]
    for work in works:
        work.end.set()
    await asyncio.gather(*running)


async def test_one_that_is_cancelled_before_its_turn_never_starts(lanes):
    first, second, third = Work(), Work(), Work()
    running = [asyncio.create_task(lanes.run(work, LONG)) for work in (first, second, third)]
    await until(first.started.is_set)
    running[1].cancel()
    first.end.set()
    await until(third.started.is_set)
    third.end.set()
    results = await asyncio.gather(*running, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    assert not second.started.is_set()


async def test_one_that_is_cancelled_in_its_turn_keeps_the_lane_until_its_thread_is_free(lanes):
    first, second = Work(), Work()
    running = asyncio.create_task(lanes.run(first, LONG))
    await until(first.started.is_set)
    running.cancel()
    following = asyncio.create_task(lanes.run(second, LONG))
    await asyncio.sleep(0.02)
    assert running.cancelled()
    assert not second.started.is_set()
    first.end.set()
    second.end.set()
    await following


async def test_what_waits_in_the_long_lane_is_bounded(lanes, monkeypatch):
    monkeypatch.setattr(lanes_module, "MAX_LONG_BYTES", 2 * LONG)
    works = [Work(), Work()]
    running = [asyncio.create_task(lanes.run(work, LONG)) for work in works]
    await until(works[0].started.is_set)
    with pytest.raises(Overloaded, match="wait to be read already"):
        await lanes.run(Work(), LONG)
    for work in works:
        work.end.set()
    await asyncio.gather(*running)
    assert await lanes.run(lambda: "room again", LONG) == "room again"


@pytest.mark.parametrize("num_bytes", [1, LONG])
async def test_errors_reach_who_waits(lanes, num_bytes):
    def fail():
        raise InvalidRequest("no")

    for _ in range(2):
        with pytest.raises(InvalidRequest, match="no"):
            await lanes.run(fail, num_bytes)
