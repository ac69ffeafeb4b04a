"""Server-sent events as ready bytes: per token only the text itself is encoded, all around it is constant."""

import orjson

from serving.errors import ServiceError
from serving.gateway.errors import error_json

DONE = b"data: [DONE]\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies must not hold tokens back
MEDIA_TYPE = "text/event-stream"


def event(json: bytes) -> bytes:
    return b"data: " + json + b"\n\n"


def error_event(error: ServiceError) -> bytes:
    """The last event of a stream that failed after its first byte."""
    return event(error_json(error))


class TextEvent:
    """One chunk with a hole where the text goes."""

    def __init__(self, before: bytes, after: bytes) -> None:
        self.before = b"data: " + before
        self.after = after + b"\n\n"

    def fill(self, text: str) -> bytes:
        return self.before + orjson.dumps(text) + self.after
