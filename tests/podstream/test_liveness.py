"""When a process counts as hung."""

import asyncio

import pytest

from podstream import liveness
from podstream.liveness import FIRST_MISSES, MISSES, grpc_answers, http_answers, until_hung
from tests.services import running_gateway, running_replica


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(liveness, "ASK_S", 0.0)


async def questions_until_hung(*answers: bool) -> int:
    """How many it takes; then nothing but silence."""
    asked, left = 0, list(answers)

    async def ask():
        nonlocal asked
        asked += 1
        return bool(left) and left.pop(0)

    await asyncio.wait_for(until_hung(ask), 5)
    return asked


async def test_misses_in_a_row_are_counted_once_it_has_answered():
    assert await questions_until_hung(True) == 1 + MISSES
    assert await questions_until_hung(False, False, False, False, False, False, False, True) == 8 + MISSES


async def test_one_that_never_answers_has_more_time_and_not_for_ever():
    assert await questions_until_hung() == FIRST_MISSES
    assert await questions_until_hung(*[False] * (FIRST_MISSES - 1), True) == FIRST_MISSES + MISSES


async def test_an_answer_in_between_makes_good():
    assert await questions_until_hung(True, *[False] * (MISSES - 1), True) == 1 + MISSES + MISSES


async def test_real_programs_answer_until_they_are_gone():
    async with running_replica() as replica:
        async with running_gateway(replica.address, ready=False) as gateway:
            by_http, by_grpc = http_answers(gateway.url), grpc_answers(replica.address)
            assert await by_http()
        assert not await by_http()
    assert not await by_grpc(), "this one has no health service; a real one is in the e2e tests"
