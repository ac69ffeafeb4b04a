"""Inbox: what a replica said about one request and its reader has not taken yet.

Text that arrives while the reader is busy (a slow HTTP client) is joined into one Delta: an inbox never holds more than
the answer itself. Imports no JAX.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from serving.errors import ServiceError
from serving.replica.events import Accepted, Delta, Event, Finished, TokenLogprob


class Inbox:
    """Of one answer. One writer (the client's stream reader) and one reader, both on the same event loop."""

    def __init__(self, choice: int = 0) -> None:
        self._choice = choice
        self._accepted: Accepted | None = None
        self._parts: list[str] = []
        self._num_tokens = 0
        self._logprobs: list[TokenLogprob] = []
        self._prompt: list[TokenLogprob] = []
        self._embedding = b""
        self._end: Finished | ServiceError | None = None
        self._on_news: Callable[[], None] = _nobody_waits

    @property
    def ended(self) -> bool:
        return self._end is not None

    def listen(self, on_news: Callable[[], None]) -> None:
        self._on_news = on_news

    def accept(self, accepted: Accepted) -> None:
        """Answers to one prompt are accepted together: the first one tells."""
        if self._choice == 0:
            self._accepted = accepted
            self._on_news()

    def add(self, delta: Delta) -> None:
        self._parts.append(delta.text)
        self._num_tokens += delta.num_tokens
        self._logprobs += delta.logprobs
        self._prompt += delta.prompt
        self._embedding = self._embedding or delta.embedding
        self._on_news()

    def end(self, end: Finished | ServiceError) -> None:
        """The first end counts."""
        if isinstance(end, Finished):
            end = dataclasses.replace(end, choice=self._choice)
        self._end = self._end or end
        self._on_news()

    def take(self) -> Event | None:
        """The next event, in order, or None; raises the error that ended the request. An end may be taken again."""
        if accepted := self._accepted:
            self._accepted = None
            return accepted
        if self._parts:
            return self._take_delta()
        if isinstance(self._end, ServiceError):
            raise self._end
        return self._end

    def _take_delta(self) -> Delta:
        text, logprobs, prompt = "".join(self._parts), tuple(self._logprobs), tuple(self._prompt)
        delta = Delta(text, self._num_tokens, logprobs, self._choice, prompt, self._embedding)
        self._parts, self._num_tokens, self._logprobs, self._prompt, self._embedding = [], 0, [], [], b""
        return delta


class Inboxes:
    """Of all answers to one prompt, read as one stream of events."""

    def __init__(self, inboxes: Sequence[Inbox]) -> None:
        self._open = list(inboxes)
        self._waiter: asyncio.Future[None] | None = None
        for inbox in inboxes:
            inbox.listen(self._wake)

    @property
    def ended(self) -> bool:
        """Every answer has told its end."""
        return not self._open

    async def take(self) -> Event:
        """The next event of any answer; raises the first error, which is that of all of them."""
        while (event := self._next()) is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return event

    def _next(self) -> Event | None:
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


def _nobody_waits() -> None:
    pass
