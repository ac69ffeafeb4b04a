"""TraceRequests: a span for each HTTP request, which goes on in the replica."""

from starlette.types import ASGIApp, Receive, Scope, Send

from serving import tracing
from serving.context import REQUEST_ID, TRACEPARENT
from serving.gateway.http_metrics import SILENT, SeenStatus, handler_of


class TraceRequests:
    """ASGI middleware, there only where traces are on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in SILENT:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        span, traceparent = tracing.start_request(scope["method"], scope["path"], headers)
        TRACEPARENT.set(traceparent)
        seen = SeenStatus(send)
        try:
            await self._app(scope, receive, seen)
        finally:
            tracing.end_request(span, f"{scope['method']} {handler_of(scope)}", seen.status, REQUEST_ID.get())
