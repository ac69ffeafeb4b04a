"""Profiler: traces the next steps of an engine, one trace at a time. Lives on the event loop, works in threads."""

import asyncio
import logging
import re
from collections.abc import Callable

from serving.engine.api import EngineLoop
from serving.errors import InvalidRequest, Overloaded, ServiceError

logger = logging.getLogger(__name__)

MAX_STEPS = 1000  # of a busy device, some hundred megabytes
MAX_WAIT_S = 600.0
POLL_S = 0.002
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)


class Profiler:
    def __init__(self, engine: EngineLoop, num_steps: Callable[[], int], folder: str | None) -> None:
        """`num_steps()` tells how many steps have run since the start. Traces lie below `folder`, a path or URL."""
        self._folder = folder
        self._engine = engine
        self._num_steps = num_steps
        self._stopping: asyncio.Task[None] | None = None
        self._busy = False

    async def trace(self, steps: int, name: str, wait_s: float) -> tuple[int, str]:
        """Write a trace of at least `steps` steps, fewer when they do not come in `wait_s` seconds; returns how many,
        and in which folder they are.

        Raises InvalidRequest for impossible wishes, Overloaded while another trace is written.
        """
        _check(steps, name, wait_s)
        if self._folder is None:
            raise InvalidRequest("no folder for traces was given; start the replica with --profile-dir DIR.")
        folder = f"{self._folder.rstrip('/')}/{name}"
        if self._busy:
            raise Overloaded("another trace is being written; try again when it is done.", retry_after_s=10)
        self._busy = True
        try:
            await asyncio.to_thread(self._engine.start_trace, folder)
        except ServiceError:
            self._busy = False
            raise
        return await self._until(steps, wait_s), folder

    async def _until(self, steps: int, wait_s: float) -> int:
        first = self._num_steps()
        end = asyncio.get_running_loop().time() + wait_s
        try:
            while self._num_steps() - first < steps and asyncio.get_running_loop().time() < end:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            traced = self._num_steps() - first
        finally:  # also when nobody waits any more: a trace that is not stopped grows
            self._stopping = asyncio.create_task(asyncio.to_thread(self._engine.stop_trace))
            self._stopping.add_done_callback(self._stopped)
        await asyncio.shield(self._stopping)
        return traced

    def _stopped(self, stopping: asyncio.Task[None]) -> None:
        self._busy = False
        if not stopping.cancelled() and (error := stopping.exception()):
            logger.error("the trace failed: %s", error)


def _check(steps: int, name: str, wait_s: float) -> None:
    if not 1 <= steps <= MAX_STEPS:
        raise InvalidRequest(f"a trace may have 1 to {MAX_STEPS:,} steps, got {steps:,}.", param="steps")
    if not 0 < wait_s <= MAX_WAIT_S:
        raise InvalidRequest(f"a trace may wait up to {MAX_WAIT_S:g} s for steps, got {wait_s:g}.", param="wait_s")
    if not NAME.fullmatch(name):
        raise InvalidRequest(
            f"a trace has a name of up to 100 letters, digits, dots and dashes, no path, got {name[:100]!r}.",
            param="name",
        )
