"""AdapterLoad: one adapter on its way, in a thread of its own, which may be left behind.

What reads from a bucket that does not answer can be interrupted by nobody. So whoever waits gives up after a while, and
the thread, should it ever come back, finds that its place is no longer its own.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

ReadAndWrite = Callable[[Callable[[], bool]], None]
"""Reads, asks whether it may write, and writes."""


class AdapterLoad:
    def __init__(self, name: str, work: ReadAndWrite) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._writes = self._given_up = False
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self.thread = threading.Thread(target=self._run, name=f"load-adapter {name}", daemon=True)
        self.thread.start()

    async def wait(self, timeout_s: float) -> None:
        """Raises what the load raised, or TimeoutError when it was given up, by this or by `give_up`: then nothing was
        and nothing will be written."""
        await asyncio.wait([self._done], timeout=timeout_s)
        if not self._done.done() and self.give_up():
            raise TimeoutError
        await self._done  # what is being written is there soon

    def give_up(self) -> bool:
        """False if it is too late for that."""
        with self._lock:
            self._given_up = self._given_up or not self._writes
            given_up = self._given_up
        if given_up and not self._done.done():
            self._done.set_exception(TimeoutError())
        return given_up

    def _may_write(self) -> bool:
        with self._lock:
            self._writes = not self._given_up
            return self._writes

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._work(self._may_write)
        except BaseException as raised:  # noqa: BLE001 - it belongs to who waits
            error = raised
        with suppress(RuntimeError):  # the loop has ended meanwhile, and whoever waited there
            self._loop.call_soon_threadsafe(self._settle, error)

    def _settle(self, error: BaseException | None) -> None:
        if self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)
