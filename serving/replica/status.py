"""ReplicaStatus: what a replica says about itself. Plain data, imports no JAX."""

import enum
from dataclasses import dataclass, field

from serving.dialect import ToolDialect
from serving.engine.api import StepStats
from serving.request import Load


class ReplicaState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    STUCK = "stuck"
    """A step does not end; whether it ever will, nobody knows."""
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """One that may be asked for."""

    name: str
    path: str
    num_running: int = 0
    """Answers that are written with it."""
    num_waiting: int = 0
    """And that wait."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    state: ReplicaState = ReplicaState.STARTING
    model: str = ""
    """Name under which the model is served; empty until it is loaded."""
    max_seq_len: int = 0
    created_unix_s: int = 0
    """When the model was loaded."""
    detail: str = ""
    """What it is doing while starting, or why it failed."""
    load: Load = field(default_factory=Load)
    stats: StepStats = field(default_factory=StepStats)
    tool_dialect: ToolDialect = ToolDialect.NONE
    """How the model writes calls of tools."""
    thinks: bool = False
    """Whether its answers may begin with thoughts."""
    adapters: tuple[ServedAdapter, ...] = ()
    max_adapters: int = 0
    """Places for them on the device."""
    source: str = ""
    """Where its weights came from, with the step of a run."""

    @property
    def ready(self) -> bool:
        return self.state is ReplicaState.READY
