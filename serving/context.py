"""What is known of the request that the running task works on: for logs, and for whoever it asks next."""

from contextvars import ContextVar

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="")
"""W3C trace context; empty where nobody traces."""
