"""Work for a client that may go away: then it ends wherever it stands."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.errors import ServiceError
from serving.gateway.errors import error_response
from serving.gateway.protocol import Connection


class WhileConnected(Response):
    """What `make` makes, or the error that it raises; a client that goes away ends the work."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, Response]]) -> None:
        super().__init__()
        self._make = make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer() -> None:
            try:
                response = await self._make()
            except ServiceError as error:
                response = error_response(error)
            await response(scope, receive, send)

        await run_while_connected(scope, receive, answer())


async def run_while_connected(scope: Scope, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or cancel it when the client goes away."""
    connection = Connection.of(scope)
    if connection is None:
        await _race(receive, work)
    else:
        await _run(connection, work)


async def _run(connection: Connection, work: Coroutine[Any, Any, None]) -> None:
    """In the task that is here already: others cost each request more than its parsing."""
    task = asyncio.current_task()
    assert task is not None, "responses run in tasks"
    connection.on_gone = task.cancel
    try:
        if connection.gone:
            task.cancel()
        await work
    except asyncio.CancelledError:
        if not connection.gone or task.uncancel():  # somebody else has cancelled it
            raise
    finally:
        connection.on_gone = None


async def _race(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """On servers that tell of it by a message alone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
