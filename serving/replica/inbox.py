"""Inbox: what a replica said about one request and its reader has not taken yet.

Text that arrives while the reader is busy (a slow HTTP client) is joined into one Delta: an inbox never holds more than
the answer itself. Imports no JAX.
"""

import asyncio

from serving.errors import ServiceError
from serving.replica.events import Accepted, Delta, Event, Finished, TokenLogprob


class Inbox:
    """One writer (the client's stream reader) and one reader (`take`), both on the same event loop."""

    def __init__(self) -> None:
        self._accepted: Accepted | None = None
        self._parts: list[str] = []
        self._num_tokens = 0
        self._logprobs: list[TokenLogprob] = []
        self._end: Finished | ServiceError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        return self._end is not None

    def accept(self, prompt_tokens: int) -> None:
        self._accepted = Accepted(prompt_tokens)
        self._wake()

    def add(self, delta: Delta) -> None:
        self._parts.append(delta.text)
        self._num_tokens += delta.num_tokens
        self._logprobs += delta.logprobs
        self._wake()

    def end(self, end: Finished | ServiceError) -> None:
        """The first end counts."""
        self._end = self._end or end
        self._wake()

    async def take(self) -> Event:
        """The next event, in order; raises the error that ended the request."""
        while (event := self._next()) is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return event

    def _next(self) -> Event | None:
        if accepted := self._accepted:
            self._accepted = None
            return accepted
        if self._parts:
            return self._take_delta()
        if isinstance(self._end, ServiceError):
            raise self._end
        return self._end

    def _take_delta(self) -> Delta:
        delta = Delta("".join(self._parts), self._num_tokens, tuple(self._logprobs))
        self._parts, self._num_tokens, self._logprobs = [], 0, []
        return delta

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
