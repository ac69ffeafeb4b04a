"""Supervisor: keeps a replica and a gateway running, and takes them down in order. Of a replica there may be several
processes, which share a mesh.

1. Both are started at once; the gateway answers probes while the replica loads.
2. One that ends is started again after 1, 2, 4 .. 30 s; if the first start already fails, all is given up.
   The processes of one replica end with each other, so they are all started again, and find each other again; one
   that cannot, since it is frozen, is killed.
3. One that runs but does not answer any more is killed, which is an end like any other.
4. SIGINT, SIGTERM or SIGHUP: the gateway drains (stops taking requests, finishes its streams), then the replica.
   A second signal kills both.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from model.errors import PodstreamError
from podstream.child import Child, Program
from podstream.liveness import until_hung

FIRST_DELAY_S = 1.0
MAX_DELAY_S = 30.0
STABLE_S = 60.0
"""A process that lived this long starts its next life with the first delay."""
STOP_MARGIN_S = 5.0
"""Beyond the drain time, for the rest of a shutdown."""

END_TOGETHER_S = 15.0
"""What the processes of a replica get to find out that one of them has ended: more than `serving.hosts` takes."""

Say = Callable[[str], None]


class StartFailed(PodstreamError):
    """A process ended before the service was ready for the first time."""


@dataclass(slots=True)
class Backoff:
    """How long to wait before the next start."""

    next_s: float = FIRST_DELAY_S

    def delay_after(self, lived_s: float) -> float:
        if lived_s >= STABLE_S:
            self.next_s = FIRST_DELAY_S
        delay_s, self.next_s = self.next_s, min(2 * self.next_s, MAX_DELAY_S)
        return delay_s


class Supervisor:
    """`ready` must be awaitable that returns when the service works; until then a process that ends is fatal."""

    def __init__(
        self, replica: Program, gateway: Program, drain_s: float, say: Say, followers: Sequence[Program] = ()
    ) -> None:
        """`followers` are the replica's other processes, which end when it does."""
        self._programs = (replica, *followers, gateway)
        self._together = {replica.name, *(follower.name for follower in followers)}
        self._stop_order = (gateway.name, replica.name, *(follower.name for follower in followers))
        self._drain_s = drain_s
        self._say = say
        self._children: dict[str, Child] = {}
        self._stopping = asyncio.Event()
        self._was_ready = False

    async def run(self, until_ready: Coroutine[Any, Any, None]) -> None:
        """Serve until a signal. Raises StartFailed."""
        self._listen()
        keepers = [asyncio.create_task(self._keep(program)) for program in self._programs]
        becoming_ready = asyncio.create_task(self._become_ready(until_ready))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([*keepers, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel([*keepers, becoming_ready, stopping])
            await self._stop_children()
        for keeper in keepers:
            if not keeper.cancelled():
                keeper.result()

    def pid_of(self, name: str) -> int | None:
        child = self._children.get(name)
        return child.pid if child else None

    async def _keep(self, program: Program) -> None:
        backoff = Backoff()
        while True:
            lived_s, how = await self._live(program)
            if not self._was_ready:
                raise StartFailed(f"the {program.name} ended while it was starting ({how}); its own words are above.")
            delay_s = backoff.delay_after(lived_s)
            self._say(f"the {program.name} ended ({how}); it is started again in {delay_s:g} s")
            if program.name in self._together:
                others = [self._children[name] for name in self._together - {program.name} if name in self._children]
                await asyncio.gather(*map(self._end_with_it, others))
            await asyncio.sleep(delay_s)

    async def _live(self, program: Program) -> tuple[float, str]:
        """One life of a program: how long, and how it ended."""
        clock = asyncio.get_running_loop().time
        born = clock()
        child = self._children[program.name] = await Child.start(program)
        watching = asyncio.create_task(self._kill_when_hung(program, child))
        try:
            how = await child.wait()
        finally:
            watching.cancel()
        return clock() - born, how

    async def _end_with_it(self, other: Child) -> None:
        if not await other.end_within(END_TOGETHER_S):
            self._say(f"the {other.name} did not end with it and is killed")

    async def _kill_when_hung(self, program: Program, child: Child) -> None:
        if program.answers is not None:
            await until_hung(program.answers)
            self._say(f"the {program.name} does not answer any more and is killed")
            child.kill()

    async def _become_ready(self, until_ready: Coroutine[Any, Any, None]) -> None:
        await until_ready
        self._was_ready = True

    async def _stop_children(self) -> None:
        """Gateway first: its streams need the replica."""
        for name in self._stop_order:
            if child := self._children.get(name):
                await child.stop(self._drain_s + STOP_MARGIN_S)

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._say("killing what still runs")
            for child in self._children.values():
                child.kill()
            return
        self._say(f"stopping: running answers get up to {self._drain_s:g} s; once more to stop at once")
        self._stopping.set()


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
