"""BodyBudget: the memory of all bodies that are being read, together."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.gateway.errors import TooManyBodies

FREE_BYTES = 64 << 10
"""Of each body, not counted: whoever fills the budget keeps out long bodies, never ordinary ones."""
LARGEST_AT_ONCE = 4
RETRY_AFTER_S = 1


class BodyBudget:
    """One per app. Its owners are the bodies that are not answered yet."""

    def __init__(self, num_bytes: int) -> None:
        self._most = num_bytes
        self.num_held = 0
        self.turn = asyncio.Lock()
        """Long bodies are understood one after another."""
        self.next_turn_s = 0.0
        """By the monotonic clock: others come first until then."""

    def share(self) -> "Share":
        return Share(self)

    def take(self, num_bytes: int) -> None:
        """Raises TooManyBodies."""
        if self.num_held + num_bytes > self._most:
            raise TooManyBodies(
                f"the bodies that are being read have {self.num_held:,} bytes already, at most {self._most:,} are kept "
                "at once; send it again in a moment.",
                retry_after_s=RETRY_AFTER_S,
            )
        self.num_held += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.num_held -= num_bytes


class Share:
    """What one body has taken."""

    __slots__ = ("_budget", "_num_read", "_num_taken")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._num_read = self._num_taken = 0

    def grow(self, num_bytes: int) -> None:
        """Raises TooManyBodies."""
        self._num_read += num_bytes
        wanted = self._num_read - FREE_BYTES - self._num_taken
        if wanted > 0:
            self._budget.take(wanted)
            self._num_taken += wanted

    def release(self) -> None:
        """Also what comes from now on begins anew."""
        self._budget.give_back(self._num_taken)
        self._num_read = self._num_taken = 0


class BoundBodies:
    """ASGI middleware. A body counts from its first byte until its answer begins: by then it was refused, or the
    replica has what matters of it."""

    def __init__(self, app: ASGIApp, budget: BodyBudget) -> None:
        self._app, self._budget = app, budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        share = self._budget.share()

        async def receive_counted() -> Message:
            message = await receive()
            share.grow(len(message.get("body", b"")))
            return message

        async def send_counted(message: Message) -> None:
            share.release()
            await send(message)

        try:
            await self._app(scope, receive_counted, send_counted)
        finally:
            share.release()
