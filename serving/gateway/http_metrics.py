"""HttpMetrics: requests by path, method and class of status, under the names that vLLM's servers use."""

import logging
import time

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.process import ACCESS

logger = logging.getLogger(ACCESS)

DURATION_S = (0.1, 0.5, 1.0)
METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"})
NO_HANDLER = "none"
SILENT = frozenset({"/metrics", "/health", "/live", "/ready", "/readyz", "/v2/health/live", "/v2/health/ready"})
"""Probes and scrapes would drown the rest."""


class HttpMetrics:
    """ASGI middleware. A path that no route has is `none`: what strangers ask for must not become labels."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        labels = ("handler", "method")
        self._requests = Counter("http_requests", "HTTP requests.", (*labels, "status"), registry=registry)
        self._durations = Histogram(
            "http_request_duration_seconds",
            "From a request's headers to the end of its answer.",
            labels,
            buckets=DURATION_S,
            registry=registry,
        )
        self._of: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        """By handler, method and class of status: looking labels up anew takes longer than counting."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in SILENT:
            await self._app(scope, receive, send)
            return
        started, seen = time.perf_counter(), SeenStatus(send)
        try:
            await self._app(scope, receive, seen)
        finally:
            self._see(scope, seen.status, time.perf_counter() - started)

    def _see(self, scope: Scope, status: int, duration_s: float) -> None:
        handler = handler_of(scope)
        method = scope["method"] if scope["method"] in METHODS else "other"
        labels = handler, method, status // 100
        if labels not in self._of:
            requests = self._requests.labels(handler, method, f"{status // 100}xx")
            self._of[labels] = requests, self._durations.labels(handler, method)
        requests, durations = self._of[labels]
        requests.inc()
        durations.observe(duration_s)
        if logger.isEnabledFor(logging.INFO):
            fields = {"method": scope["method"], "path": scope["path"], "status": status, "duration_s": duration_s}
            logger.info("%(method)s %(path)s %(status)d in %(duration_s).3f s", fields, extra={"fields": fields})


class SeenStatus:
    """A `send` that remembers the answer's status: 500 as long as none was sent."""

    def __init__(self, send: Send) -> None:
        self.status = 500
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


def handler_of(scope: Scope) -> str:
    """The path as its route has it."""
    return str(getattr(scope.get("route"), "path", NO_HANDLER))
