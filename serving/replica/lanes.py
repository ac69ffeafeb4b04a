"""Lanes: the threads that read prompts. Long ones have one of their own: a short one never waits for a long one."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from serving.errors import Overloaded

NUM_TOKENIZER_THREADS = 2
NUM_GRAMMAR_THREADS = 2  # of their own: a crowd of grammars, up to some tenths of a second each, holds up nobody else
LONG_BYTES = 128 << 10
"""Up to here a prompt takes some tens of milliseconds."""
MAX_LONG_BYTES = 256 << 20
"""Of all that wait in the long lane."""

ResultT = TypeVar("ResultT")


class Lanes:
    """Used on one event loop. Who is cancelled while it waits for its thread is never started."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(NUM_TOKENIZER_THREADS, thread_name_prefix="tokenize")
        self._grammar = ThreadPoolExecutor(NUM_GRAMMAR_THREADS, thread_name_prefix="grammar")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="tokenize-long")
        self._turn = asyncio.Lock()
        """Whose the long lane is: those that wait in a thread pool keep their memory when they are cancelled."""
        self._num_long_bytes = 0

    async def run(self, work: Callable[[], ResultT], num_bytes: int, *, grammar: bool = False) -> ResultT:
        """`work` on a prompt of so many bytes. Raises Overloaded, and what the work raises."""
        if num_bytes <= LONG_BYTES:
            threads = self._grammar if grammar else self._short
            return await asyncio.get_running_loop().run_in_executor(threads, work)
        if self._num_long_bytes + num_bytes > MAX_LONG_BYTES:
            raise Overloaded(
                f"long prompts of {self._num_long_bytes:,} bytes wait to be read already; try again later.",
                retry_after_s=1,
            )
        self._num_long_bytes += num_bytes
        try:
            return await self._run_long(work)
        finally:
            self._num_long_bytes -= num_bytes

    async def _run_long(self, work: Callable[[], ResultT]) -> ResultT:
        await self._turn.acquire()
        running = asyncio.get_running_loop().run_in_executor(self._long, work)
        running.add_done_callback(self._end_turn)
        return await asyncio.shield(running)  # one that is cancelled now keeps its thread busy all the same

    def _end_turn(self, done: asyncio.Future[ResultT]) -> None:
        self._turn.release()
        if not done.cancelled():
            done.exception()  # of whom nobody waits for any more, nobody asks

    def close(self) -> None:
        for threads in (self._short, self._long, self._grammar):
            threads.shutdown(wait=False, cancel_futures=True)
