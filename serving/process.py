"""What every serving process does about signals and its parent: stop politely when asked, and never outlive it; about
its log, and about the garbage collector."""

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Any

import orjson

from serving.context import REQUEST_ID

logger = logging.getLogger(__name__)

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
ACCESS = "serving.access"
"""Logger of one event per HTTP request."""
GC_THRESHOLD = 20_000  # new objects between two looks; 700 by default
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1  # of glibc's malloc.h
LARGE_BLOCK = 1 << 20
LAST_RESORT_S = 10.0  # beyond the drain time, when the event loop itself no longer answers


def spare_the_collector() -> None:
    """To be called before a process is ready: what is there now stays, and each token makes some objects that need no
    collector, so it looks less often. Looking at all that JAX and a model leave takes as long as some steps."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 50)


def give_back_large_blocks() -> None:
    """glibc keeps what it was asked for once, up to 32 MiB each. Where strangers decide how much that is, it goes back
    to the system. Other C libraries do so by themselves."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
        mallopt(M_TRIM_THRESHOLD, LARGE_BLOCK)


class StopRequest:
    """Set once: by SIGTERM, SIGINT, or the end of the parent. Lives on the event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.reason = ""
        self.is_orphan = False
        """Whether the parent is gone: nobody stops or replaces this process any more."""

    def listen(self) -> None:
        """Take over SIGTERM and SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.set, number.name)

    def follow_parent(self, drain_s: float) -> None:
        """Stop when standard input ends: the parent holds its other end, however it dies."""
        loop = asyncio.get_running_loop()
        arguments = (loop, self, sys.stdin.fileno(), drain_s + LAST_RESORT_S)
        threading.Thread(target=_watch_parent, args=arguments, name="parent-watch", daemon=True).start()

    def orphan(self) -> None:
        self.is_orphan = True
        self.set("the parent process is gone")

    def set(self, reason: str) -> None:
        if not self._event.is_set():
            logger.info("stopping: %s", reason)
            self.reason = reason
            self._event.set()

    async def wait(self) -> None:
        await self._event.wait()


def _watch_parent(loop: asyncio.AbstractEventLoop, stop: StopRequest, fd: int, patience_s: float) -> None:
    while os.read(fd, 1024):
        pass
    loop.call_soon_threadsafe(stop.orphan)
    timer = threading.Timer(patience_s, os._exit, args=(1,))
    timer.daemon = True
    timer.start()


def die_with_parent(drain_s: float) -> None:
    """For a process without an event loop that others end: die for want of a parent only when these had time to."""
    threading.Thread(target=_die_with_parent, args=(drain_s,), name="parent-watch", daemon=True).start()


def _die_with_parent(drain_s: float) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    time.sleep(drain_s + LAST_RESORT_S)
    os._exit(1)


def leave(code: int, words: str) -> None:
    """End this process at once, whatever its other threads wait for."""
    if words:
        print(words, file=sys.stderr)
    sys.stderr.flush()
    os._exit(code)


def configure_logging(log_format: str, *, quiet: bool) -> None:
    """One event per line on standard error; quiet beneath a supervisor, which tells the life cycle itself. As JSON they
    are for machines, which get all."""
    handler = logging.StreamHandler(sys.stderr)
    as_json = log_format == "json"
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=logging.WARNING if quiet and not as_json else logging.INFO, handlers=[handler])
    logging.getLogger(ACCESS).setLevel(logging.INFO if as_json else logging.WARNING)


class JsonFormatter(logging.Formatter):
    """An object with time, level, logger and message; the request's id where there is a request; and what else is known
    of the event by name."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()
