"""Door and Cors: the rules of access, applied before anything else of a request is read."""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.errors import ServiceError
from serving.gateway.access import AccessRules
from serving.gateway.errors import error_response


class Door:
    """ASGI middleware, of WebSockets, too."""

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self._app, self._rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._rules.check(scope.get("method", "GET"), Headers(scope=scope), scope["http_version"])
        except ServiceError as error:
            await _refuse(error, scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def _refuse(error: ServiceError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": ""})  # before it is accepted: a 403
    else:
        await error_response(error)(scope, receive, send)


class Cors(CORSMiddleware):
    """Tells browsers that pages of allowed origins may ask with any header, and read any header of ours."""

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        super().__init__(
            app, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"], allow_private_network=True
        )
        self._rules = rules

    def is_allowed_origin(self, origin: str) -> bool:
        return self._rules.allows_origin(origin)

    def preflight_response(self, request_headers: Headers) -> Response:
        try:
            self._rules.check("OPTIONS", request_headers)
        except ServiceError as error:
            return error_response(error)
        return super().preflight_response(request_headers)
