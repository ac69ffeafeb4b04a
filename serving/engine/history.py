"""History: when one sequence came, got a slot, and had its prompt computed. Monotonic seconds."""

import time
from dataclasses import dataclass, field

from serving.engine.api import Prefilled


@dataclass(slots=True)
class History:
    arrived_s: float = field(default_factory=time.monotonic)
    admitted_s: float = 0.0
    first_step: int = 0
    is_told: bool = False

    def admit(self, step: int) -> None:
        """It gets its first slot, for a step of that number."""
        self.admitted_s, self.first_step = time.monotonic(), step

    def prefilled(self) -> Prefilled | None:
        """Its prompt is computed. None if that was told before: a preempted one computes it again."""
        if self.is_told:
            return None
        self.is_told = True
        return Prefilled(self.admitted_s - self.arrived_s, time.monotonic() - self.admitted_s, self.first_step)
