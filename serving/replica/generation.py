"""Generation: one request on its way at a replica, as its reader sees it. Imports no JAX."""

from collections.abc import Callable, Sequence

from serving.replica.events import Event
from serving.replica.inbox import Inbox, Inboxes, Sink


class Generation:
    """The events of one request: iterate, and `close` when done or no longer interested."""

    def __init__(self, release: Callable[[int], None], handles: range, inboxes: Sequence[Inbox]) -> None:
        self._release = release
        self._handles = handles
        self._inboxes = Inboxes(inboxes)
        self._closed = False

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> Event:
        """Raises ServiceError when the request fails."""
        if self._closed or self._inboxes.ended:
            raise StopAsyncIteration
        return await self._inboxes.take()

    def listen(self, on_news: Callable[[], None], sink: Sink | None = None) -> None:
        """From now on `on_news` is called when there is something for `poll`; nobody may iterate any more. `sink` gets
        text before which nothing waits, as it comes, and says whether it has taken it."""
        self._inboxes.listen(on_news, sink)

    def poll(self) -> Event | None:
        """The next event that is there already. Raises ServiceError when the request fails."""
        return self._inboxes.poll()

    def close(self) -> None:
        """Free the slots: cancels the answers that have not ended. May be called twice."""
        self._closed = True
        for handle in self._handles:
            self._release(handle)
