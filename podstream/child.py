"""Child: one supervised process. It lives in its own process group, and ends with its parent."""

import asyncio
import contextlib
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from podstream.liveness import Answers


@dataclass(frozen=True, slots=True)
class Program:
    """What to start. It must stop when its standard input ends (`--follow-parent`)."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    pass_fds: Sequence[int] = field(default=())
    answers: Answers | None = None
    """Whether a running one does; None where nobody can ask it."""


class Child:
    """A running program. Its own group keeps a terminal's Ctrl-C away from it: the supervisor orders the stop."""

    def __init__(self, program: Program, process: Process) -> None:
        self.name = program.name
        self._process = process

    @classmethod
    async def start(cls, program: Program) -> "Child":
        process = await asyncio.create_subprocess_exec(
            *program.argv, env=dict(program.env), stdin=PIPE, pass_fds=program.pass_fds, process_group=0
        )
        return cls(program, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> str:
        """Wait for its end; returns how it ended, for people."""
        return describe_exit(await self._process.wait())

    async def stop(self, patience_s: float) -> None:
        """Ask politely, then insist."""
        self._signal(signal.SIGTERM)
        await self.end_within(patience_s)

    async def end_within(self, patience_s: float) -> bool:
        """Whether it did so by itself; else it is killed."""
        try:
            await asyncio.wait_for(self._process.wait(), patience_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()
            return False
        return True

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                self._process.send_signal(number)


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    hint = ", perhaps for want of memory" if -code == signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"
