"""RequestId: every answer bears the x-request-id that the client sent, or a fresh one."""

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.context import REQUEST_ID

HEADER = "x-request-id"
_ACCEPTED = re.compile(r"[\x21-\x7e]{1,128}")


class RequestId:
    """ASGI middleware; the id lies in `request.state.request_id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = choose_request_id(Headers(scope=scope).get(HEADER))
        scope.setdefault("state", {})["request_id"] = request_id
        REQUEST_ID.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def choose_request_id(sent: str | None) -> str:
    """The client's own if it is short and printable, since it goes into logs and headers."""
    return sent if sent and _ACCEPTED.fullmatch(sent) else uuid.uuid4().hex


def request_id_of(request: Request) -> str:
    return str(request.state.request_id)
