import asyncio

from serving.replica import convert
from serving.replica.events import Accepted, Delta, Ending, TokenLogprob
from serving.replica.outbox import Outbox
from serving.replica.status import ReplicaState, ReplicaStatus
from serving.request import FinishReason, Usage


async def test_everything_leaves_in_one_batch():
    outbox = Outbox()
    outbox.accept(1, Accepted(3))
    outbox.add(1, Delta("a", 1))
    outbox.add(2, Delta("b", 1))
    outbox.finish(1, Ending(FinishReason.STOP, Usage(3, 1)))
    batch = await outbox.take()
    assert [a.handle for a in batch.accepted] == [1]
    assert [(d.handle, d.text) for d in batch.deltas] == [(1, "a"), (2, "b")]
    assert [(f.handle, f.reason) for f in batch.finished] == [(1, "stop")]


async def test_text_of_one_request_is_joined_while_nobody_takes_it():
    outbox = Outbox()
    for _ in range(1000):
        outbox.add(1, Delta("a", 1))
    (delta,) = (await outbox.take()).deltas
    assert (delta.text, delta.num_tokens) == ("a" * 1000, 1000)


async def test_take_waits_for_news():
    outbox = Outbox()
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0.01)
    assert not taking.done()
    outbox.add(1, Delta("a", 1))
    assert len((await taking).deltas) == 1


async def test_only_the_newest_status_counts():
    outbox = Outbox()
    outbox.set_status(ReplicaStatus(detail="old"))
    outbox.set_status(ReplicaStatus(ReplicaState.READY))
    assert (await outbox.take()).status.state == "ready"


async def test_a_gateway_that_does_not_read_is_not_listened_to():
    outbox = Outbox(max_unsent=2)
    outbox.finish(1, Ending(FinishReason.STOP))
    await asyncio.wait_for(outbox.room(), 1)
    outbox.finish(2, Ending(FinishReason.STOP))
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await outbox.take()
    await asyncio.wait_for(waiting, 1)


async def test_sent_means_taken_and_written():
    outbox = Outbox()
    assert outbox.sent
    outbox.accept(1, Accepted(1))
    assert not outbox.sent
    await outbox.take()
    assert not outbox.sent
    outbox.mark_sent()
    assert outbox.sent


async def test_log_probabilities_are_joined_like_text():
    outbox = Outbox()
    entries = [TokenLogprob(b"a", -0.5, i, ((b"b", -1.5),)) for i in range(3)]
    for entry in entries:
        outbox.add(1, Delta("a", 1, (entry,)))
    (delta,) = (await outbox.take()).deltas
    assert convert.delta_from_pb(delta) == Delta("aaa", 3, tuple(entries))
