"""StepInputs: all that a step depends on beside what the engine knows already. Imports no JAX.

An engine that gets the same inputs makes the same plans, so several hosts that share one mesh need only hear the same.
Host 0 tells the others each step's inputs before it takes them itself.
"""

from dataclasses import dataclass
from typing import Protocol

from serving.engine.api import EngineRequest

Command = EngineRequest | str
"""A request to queue, with a seed; or the id of one to abort."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    commands: tuple[Command, ...]
    """In the order in which they came."""
    now: float
    """Monotonic seconds of host 0, against which deadlines are held."""
    took_s: float
    """What host 0 measured of the newest call that has been read; see `Engine.took_s`."""


class Peers(Protocol):
    """The other hosts, as the engine's thread of host 0 sees them. No method raises: what is wrong is in `failure`."""

    @property
    def failure(self) -> str:
        """Why the hosts cannot go on together; empty while they can. Never changes once it is set."""
        ...

    def send(self, inputs: StepInputs) -> None:
        """Have the others take the same step. Returns at once."""
        ...

    def check(self, digest: int) -> None:
        """What this host has computed up to a step, to be compared. Waits while the others are far behind."""
        ...

    def fail(self, reason: str) -> None:
        """This host cannot go on. Gives the others a moment to be the reason themselves."""
        ...

    def stop(self) -> None:
        """Let the others end."""
        ...
