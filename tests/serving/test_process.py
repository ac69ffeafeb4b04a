"""Logs as JSON: one object per event, with the id of the request that it is about."""

import json
import logging
import sys

from serving.context import REQUEST_ID
from serving.process import JsonFormatter


def written(message, *arguments, **more):
    try:
        raise ValueError("broken")
    except ValueError:
        info = sys.exc_info() if more.pop("failed", False) else None
    record = logging.LogRecord("serving.x", logging.WARNING, "", 1, message, arguments, info)
    record.__dict__.update(more)
    return json.loads(JsonFormatter().format(record))


def test_an_event_is_an_object():
    line = written("%d streams", 3)
    assert (line["level"], line["logger"], line["message"]) == ("WARNING", "serving.x", "3 streams")
    assert line["time"].endswith("+00:00") and "request_id" not in line


def test_the_request_and_other_fields_have_names():
    token = REQUEST_ID.set("r1")
    try:
        line = written("done", fields={"status": 200})
    finally:
        REQUEST_ID.reset(token)
    assert (line["request_id"], line["status"]) == ("r1", 200)


def test_an_exception_is_in_the_same_line():
    assert "ValueError: broken" in written("failed", failed=True)["exception"]
