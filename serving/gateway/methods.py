"""Methods that a path takes: HEAD wherever GET; and what those are told who ask by another (RFC 9110, 9.3, 10.2.1)."""

from collections.abc import Iterable

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

METHODS = ("DELETE", "GET", "POST")


class HeadAsGet:
    """ASGI middleware: a HEAD is answered as the GET would be; the server leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        as_get = {**scope, "method": "GET"}
        try:
            await self._app(as_get, receive, send)
        finally:
            scope["route"] = as_get.get("route")  # by which requests are counted


def allowed_methods(routes: Iterable[BaseRoute], scope: Scope) -> list[str]:
    """Of the path that is asked for; empty where there is nothing."""
    routes = list(routes)
    taken = [m for m in METHODS if any(r.matches({**scope, "method": m})[0] is Match.FULL for r in routes)]
    return [*taken, *(["HEAD"] if "GET" in taken else []), *(["OPTIONS"] if taken else [])]
