"""The middle of a stream: written as the news come, held back while the client does not read, ended once."""

import asyncio

import pytest

from serving.errors import EngineFailed
from serving.gateway.chat.format import ShortFormat
from serving.gateway.pump import EventWriter, Pump
from serving.gateway.speech.pieces import Content
from serving.gateway.transcript import Said
from serving.request import Usage
from tests.fakes import sse_events


class Exchange:
    """News by hand."""

    num_choices = 1

    def __init__(self, *, plain):
        self.news, self.is_complete, self.usage, self.tell, self.sink = [], False, Usage(), None, None
        self.see_plain, self.num_tokens = self.see_tokens if plain else None, 0

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

    def see_tokens(self, choice, num_tokens):
        self.num_tokens += num_tokens

    def hear_text(self, choice, text, num_tokens):
        self.see_tokens(choice, num_tokens)
        return Said(choice, [Content(text)])

    def come(self, text="", reason=None):
        """As an inbox does: what can be taken at once is not put anywhere."""
        if reason is None and self.sink and not self.news and self.sink(0, text, 1):
            return
        self.news.append(Said(0, [Content(text)] if text else [], reason=reason))
        self.tell()


class Connection:
    def __init__(self):
        self.parts, self.paused, self.on_resume = [], False, None

    def write(self, part):
        assert not self.paused
        self.parts.append(part)

    @property
    def texts(self):
        return [event["text"] for event in sse_events(b"".join(self.parts).decode())]


@pytest.fixture(params=[True, False], ids=["plain text", "text that is read"])
async def stream(request):
    exchange, connection = Exchange(plain=request.param), Connection()
    writer = EventWriter(exchange, ShortFormat(), connection)

    async def run():
        await Pump(exchange, writer.tell, connection).run(writer.lane())
        return writer.last

    running = asyncio.create_task(run())
    await asyncio.sleep(0)
    yield exchange, connection, running
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_news_are_written_at_once_and_the_end_is_left_to_the_caller(stream):
    exchange, connection, running = stream
    exchange.come("a")
    exchange.come("b")
    assert connection.texts == ["a", "b"], "without another turn of the event loop"
    exchange.come(reason="stop")
    assert [event["type"] for event in sse_events((await running).decode())] == ["end", "usage"]
    assert connection.texts == ["a", "b"] and exchange.num_tokens == 2


async def test_nothing_is_written_while_the_client_does_not_read(stream):
    exchange, connection, running = stream
    connection.paused = True
    exchange.come("a")
    exchange.come("b", reason="length")
    assert not connection.parts and not running.done()
    connection.paused = False
    connection.on_resume()
    assert connection.texts == ["a"]
    assert b'"b"' in await running


async def test_an_error_is_raised_to_the_caller_and_not_to_who_brought_the_news(stream):
    exchange, connection, running = stream
    exchange.come("a")
    exchange.news.append(EngineFailed("broken"))
    exchange.tell()
    with pytest.raises(EngineFailed):
        await running
    exchange.come("late")
    assert connection.texts == ["a"]


async def test_a_stream_that_is_cancelled_writes_nothing_more(stream):
    exchange, connection, running = stream
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    exchange.come("late")
    assert not connection.parts and connection.on_resume is None


@pytest.mark.parametrize("way", ["plain text", "news", "the end"])
def test_the_opening_leaves_once_with_whatever_comes_first(way):
    exchange, connection = Exchange(plain=True), Connection()
    writer = EventWriter(exchange, ShortFormat(), connection, b"opening ")
    lane = writer.lane()
    if way == "the end":
        exchange.is_complete = True
        writer.tell(Said(reason="stop"))
        assert writer.last.startswith(b"opening ") and not connection.parts
        return
    if way == "news":
        writer.tell(Said(0, [Content("a")]))
    for text in "bc":
        lane(0, text, 1)
    assert connection.parts[0].startswith(b"opening data: ")
    assert b"opening" not in b"".join(connection.parts[1:])
