"""ChatSocket: any number of turns on one WebSocket, one at a time, with the events of the short form.

client  {"type": "chat", "messages": [...], ...}   begins a turn; it brings the whole conversation
        {"type": "cancel"}                         ends the turn that runs; its end says "cancelled"
server  text, reasoning, tool_call, tool_arguments ..., end, usage; or error, after which the socket goes on
"""

import asyncio
import logging
from typing import Any

import orjson
from starlette.websockets import WebSocket, WebSocketDisconnect

from serving.context import REQUEST_ID
from serving.errors import EngineFailed, InvalidRequest, ServiceError
from serving.gateway.body import parse_in_turn
from serving.gateway.call import Services
from serving.gateway.chat.body import read_short
from serving.gateway.chat.format import Event, end_event, error_event, said_events, usage_event
from serving.gateway.exchange import each_said
from serving.gateway.request_id import HEADER, choose_request_id

logger = logging.getLogger(__name__)

CANCELLED = "cancelled"


class ChatSocket:
    """Lives as long as the connection."""

    def __init__(self, services: Services, socket: WebSocket) -> None:
        self._services = services
        self._socket = socket
        self._request_id = choose_request_id(socket.headers.get(HEADER))
        self._turn: asyncio.Task[None] | None = None

    async def run(self) -> None:
        REQUEST_ID.set(self._request_id)
        await self._socket.accept(headers=[(HEADER.encode(), self._request_id.encode())])
        try:
            while True:
                await self._hear(await self._socket.receive())
                await asyncio.sleep(0)  # thousands of messages may have come at once: others are served in between
        except WebSocketDisconnect:
            pass
        finally:
            await self._end_turn()

    async def _hear(self, message: Any) -> None:
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1000))
        try:
            fields = await self._read(message.get("text") or message.get("bytes") or b"")
            match fields.pop("type", None):
                case "chat":
                    self._begin(fields)
                case "cancel":
                    await self._cancel()
                case other:
                    raise InvalidRequest(f"type must be 'chat' or 'cancel', got {str(other)[:40]!r}.", param="type")
        except ServiceError as error:
            await self._tell(error_event(error))

    async def _read(self, text: str | bytes) -> dict[str, Any]:
        return await parse_in_turn(self._socket.app.state.body_budget, text, "the message")

    def _begin(self, fields: dict[str, Any]) -> None:
        if self._turn is not None and not self._turn.done():
            raise InvalidRequest("a turn is running; wait for its end or cancel it.")
        self._turn = asyncio.create_task(self._run_turn(fields), name="turn")

    async def _cancel(self) -> None:
        """Too late is no error: the end is on its way."""
        if self._turn is not None and not self._turn.done():
            await self._end_turn()
            await self._tell(end_event(CANCELLED))

    async def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            await asyncio.gather(self._turn, return_exceptions=True)

    async def _run_turn(self, fields: dict[str, Any]) -> None:
        try:
            await self._answer(fields)
        except ServiceError as error:
            await self._tell(error_event(error))
        except WebSocketDisconnect:
            pass
        except Exception:
            logger.exception("a turn failed")
            await self._tell(error_event(EngineFailed("the gateway failed on this turn; its log says why.")))

    async def _answer(self, fields: dict[str, Any]) -> None:
        chat = read_short(self._services, fields)
        exchange = chat.exchange(self._request_id)
        try:
            await exchange.open()
            async for said in each_said(exchange):
                for event in said_events(said):
                    await self._tell(event)
            await self._tell(usage_event(exchange.usage, chat.body.ignored))
        finally:
            exchange.close()

    async def _tell(self, event: Event) -> None:
        await self._socket.send_text(orjson.dumps(event).decode())
