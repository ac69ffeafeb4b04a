"""AnswerResponse: an answer on its way to an HTTP client, streamed or whole, both made of the same events.

The status line waits until the replica accepts, so that a refusal has its proper status. A client that goes away ends
the call wherever it stands, also before the first token.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.errors import EngineFailed, ServiceError
from serving.gateway import sse
from serving.gateway.choice import Choice
from serving.gateway.disconnect import run_while_connected
from serving.gateway.errors import error_response
from serving.gateway.exchange import Exchange, each_said
from serving.gateway.formats import AnswerFormat
from serving.gateway.keep_alive import KeepAlive
from serving.gateway.protocol import Connection
from serving.gateway.pump import EventWriter, Pump
from serving.gateway.transcript import Said

logger = logging.getLogger(__name__)

IGNORED = "x-podstream-ignored"


class AnswerResponse(Response):
    """Owns its exchange, and closes it whatever happens."""

    def __init__(self, exchange: Exchange, answer: AnswerFormat, *, stream: bool, ignored: Sequence[str] = ()) -> None:
        """`ignored` are fields that were without effect, which a header of the answer says."""
        super().__init__()
        self._exchange = exchange
        self._format = answer
        self._stream = stream
        self._more_headers = {IGNORED: ", ".join(ignored)} if ignored else {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_while_connected(scope, receive, self._answer(scope, receive, send))
        finally:
            self._exchange.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._exchange.open()
            response = None if self._stream else await self._whole()
        except ServiceError as error:
            response = error_response(error)
        if response is not None:
            await response(scope, receive, send)
        else:
            await self._send_stream(send, Connection.of(scope))

    async def _whole(self) -> Response:
        exchange = self._exchange
        choices = [Choice() for _ in range(exchange.num_choices)]

        def tell(said: Said) -> None:
            choices[said.choice].see(said)

        await Pump(exchange, tell).run()
        write = partial(self._format.whole, choices, exchange.usage)
        # What is said of long prompts is megabytes of JSON, which would hold up all other streams.
        body = await asyncio.to_thread(write) if any(choice.prompt for choice in choices) else write()
        return Response(body, media_type="application/json", headers=self._more_headers)

    async def _send_stream(self, send: Send, connection: Connection | None) -> None:
        await send(_stream_start(self._more_headers))
        stream = KeepAlive(send, connection)
        stream.start()
        try:
            last = await self._send_events(stream, connection)
        except ServiceError as error:
            last = self._format.error(error)
        except Exception:
            logger.exception("a stream failed")
            last = self._format.error(EngineFailed("the gateway failed on this stream; its log says why."))
        finally:
            stream.stop()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_events(self, stream: KeepAlive, connection: Connection | None) -> bytes:
        """Returns what closes the stream, so that it leaves together with its end."""
        send = stream.send
        exchange = self._exchange
        opening = b"".join([self._format.opening(choice) for choice in range(exchange.num_choices)])
        if opening and self._format.opens_at_once:
            await _send_part(send, opening)
            opening = b""
        if connection is not None:
            writer = EventWriter(exchange, self._format, connection, opening)
            await Pump(exchange, writer.tell, connection).run(writer.lane())
            return writer.last
        last = b""
        async for said in each_said(exchange):
            part = self._format.said(said)
            if exchange.is_complete:
                last = part
            elif part:
                await _send_part(send, opening + part)
                opening = b""
        return opening + last + self._format.end(exchange.usage)


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _stream_start(more: Mapping[str, str]) -> dict[str, Any]:
    headers = {"content-type": sse.MEDIA_TYPE, **sse.HEADERS, **more}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": encoded}
