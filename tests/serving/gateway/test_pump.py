"""The middle of a stream: written as the news come, held back while the client does not read, ended once."""

import asyncio

import pytest

from serving.errors import EngineFailed
from serving.gateway.chat.format import ShortFormat
from serving.gateway.keep_alive import KeepAlive
from serving.gateway.pump import Pump
from serving.gateway.speech.pieces import Content
from serving.gateway.transcript import Said
from serving.replica.events import Delta
from serving.request import Usage
from tests.fakes import sse_events


class Exchange:
    """News by hand."""

    def __init__(self):
        self.news, self.is_complete, self.usage, self.tell, self.sink = [], False, Usage(), None, None

    def listen(self, on_news, sink=None):
        self.tell, self.sink = on_news, sink

    def poll(self):
        if not self.news:
            return None
        said = self.news.pop(0)
        if isinstance(said, Exception):
            raise said
        self.is_complete = said.reason is not None
        return said

    def hear(self, delta):
        return Said(0, [Content(delta.text)])

    def come(self, text="", reason=None):
        """As an inbox does: what can be taken at once is not put anywhere."""
        if reason is None and self.sink and not self.news and self.sink(Delta(text, 1)):
            return
        self.news.append(Said(0, [Content(text)] if text else [], reason=reason))
        self.tell()


class Writer:
    def __init__(self):
        self.parts, self.paused, self.resume = [], False, None

    def listen(self, on_resume):
        self.resume = on_resume

    def write(self, part):
        assert not self.paused
        self.parts.append(part)

    @property
    def texts(self):
        return [event["text"] for event in sse_events(b"".join(self.parts).decode())]


@pytest.fixture
async def stream():
    exchange, writer = Exchange(), Writer()
    running = asyncio.create_task(Pump(exchange, ShortFormat(), writer, KeepAlive(None)).run())
    await asyncio.sleep(0)
    yield exchange, writer, running
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_news_are_written_at_once_and_the_end_is_left_to_the_caller(stream):
    exchange, writer, running = stream
    exchange.come("a")
    exchange.come("b")
    assert writer.texts == ["a", "b"], "without another turn of the event loop"
    exchange.come(reason="stop")
    assert [event["type"] for event in sse_events((await running).decode())] == ["end", "usage"]
    assert writer.texts == ["a", "b"]


async def test_nothing_is_written_while_the_client_does_not_read(stream):
    exchange, writer, running = stream
    writer.paused = True
    exchange.come("a")
    exchange.come("b", reason="length")
    assert not writer.parts and not running.done()
    writer.paused = False
    writer.resume()
    assert writer.texts == ["a"]
    assert b'"b"' in await running


async def test_an_error_is_raised_to_the_caller_and_not_to_who_brought_the_news(stream):
    exchange, writer, running = stream
    exchange.come("a")
    exchange.news.append(EngineFailed("broken"))
    exchange.tell()
    with pytest.raises(EngineFailed):
        await running
    exchange.come("late")
    assert writer.texts == ["a"]


async def test_a_stream_that_is_cancelled_writes_nothing_more(stream):
    exchange, writer, running = stream
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    exchange.come("late")
    assert not writer.parts and writer.resume is None
