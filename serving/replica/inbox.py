"""Inbox: what a replica said about one request and its reader has not taken yet.

Text that arrives while the reader is busy (a slow HTTP client) is joined into one Delta: an inbox never holds more than
the answer itself. Imports no JAX.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from itertools import chain

from serving.errors import ServiceError
from serving.replica.events import Accepted, Delta, Event, Finished, plain_delta

Sink = Callable[[int, str, int], bool]
"""Takes a choice's text and number of tokens at once, or says that it cannot."""


class Inbox:
    """Of one answer. One writer (the client's stream reader) and one reader, both on the same event loop."""

    def __init__(self, choice: int = 0, *, plain: bool = False) -> None:
        """`plain` if its deltas have text and nothing else, which need not be looked for then."""
        self.choice, self.plain = choice, plain
        self._accepted: Accepted | None = None
        self._deltas: list[Delta] = []
        self._end: Finished | ServiceError | None = None
        self._on_news: Callable[[], None] = _nobody_waits
        self._sink: Sink | None = None

    @property
    def ended(self) -> bool:
        return self._end is not None

    def listen(self, on_news: Callable[[], None], sink: Sink | None = None) -> None:
        """`sink` gets each text that nothing waits before."""
        self._on_news, self._sink = on_news, sink

    def accept(self, accepted: Accepted) -> None:
        """Answers to one prompt are accepted together: the first one tells."""
        if self.choice == 0:
            self._accepted = accepted
            self._on_news()

    def add(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._on_news()

    def add_text(self, text: str, num_tokens: int) -> None:
        """A delta that has nothing else, as most have: no object is made of it if the sink takes it."""
        if self._sink is not None and not self._deltas and self._sink(self.choice, text, num_tokens):
            return
        self.add(plain_delta((text, num_tokens, (), self.choice, (), b"")))

    def end(self, end: Finished | ServiceError) -> None:
        """The first end counts."""
        if isinstance(end, Finished):
            end = dataclasses.replace(end, choice=self.choice)
        self._end = self._end or end
        self._on_news()

    def take(self) -> Event | None:
        """The next event, in order, or None; raises the error that ended the request. An end may be taken again."""
        if accepted := self._accepted:
            self._accepted = None
            return accepted
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            return deltas[0] if len(deltas) == 1 else _joined(deltas)
        if isinstance(self._end, ServiceError):
            raise self._end
        return self._end


class Inboxes:
    """Of all answers to one prompt, read as one stream of events."""

    def __init__(self, inboxes: Sequence[Inbox]) -> None:
        self._open = list(inboxes)
        self._waiter: asyncio.Future[None] | None = None
        self.listen(self._wake)

    def listen(self, on_news: Callable[[], None], sink: Sink | None = None) -> None:
        """Call this whenever there is something for `poll`, in place of waking who waits in `take`. A sink may take
        text before it becomes something to poll."""
        for inbox in self._open:
            inbox.listen(on_news, sink)

    @property
    def ended(self) -> bool:
        """Every answer has told its end."""
        return not self._open

    async def take(self) -> Event:
        """The next event of any answer; raises the first error, which is that of all of them."""
        while (event := self.poll()) is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return event

    def poll(self) -> Event | None:
        """The next event that is there already."""
        for inbox in self._open:
            event = inbox.take()
            if event is not None:
                self._open.remove(inbox)
                if not isinstance(event, Finished):
                    self._open.append(inbox)  # the others' turn
                return event
        return None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _joined(deltas: Sequence[Delta]) -> Delta:
    return Delta(
        "".join([delta.text for delta in deltas]),
        sum([delta.num_tokens for delta in deltas]),
        tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        deltas[0].choice,
        tuple(chain.from_iterable(delta.prompt for delta in deltas)),
        next((delta.embedding for delta in deltas if delta.embedding), b""),
    )


def _nobody_waits() -> None:
    pass
