import asyncio

from serving.gateway.keep_alive import COMMENT, KeepAlive


async def test_only_silence_is_broken_by_comments():
    sent = []

    async def send(message):
        sent.append(message["body"])

    stream = KeepAlive(send, interval_s=0.02)
    stream.start()
    for _ in range(10):
        await stream.send({"body": b"event"})
        await asyncio.sleep(0.005)
    assert set(sent) == {b"event"}
    await asyncio.sleep(0.1)
    assert sent[-2:] == [COMMENT, COMMENT]
    stream.stop()
    count = len(sent)
    await asyncio.sleep(0.05)
    assert len(sent) == count


async def test_a_reader_that_takes_nothing_gets_one_comment():
    started = []

    async def stuck(message):
        started.append(message)
        await asyncio.Event().wait()

    stream = KeepAlive(stuck, interval_s=0.01)
    stream.start()
    await asyncio.sleep(0.08)
    assert len(started) == 1
    stream.stop()
