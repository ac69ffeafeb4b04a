"""StepWatch: whether a step of the engine is stuck. Counts looks, not seconds alone: who looks late, since the whole
machine stood still, must not take that for the device's fault."""

from dataclasses import dataclass

WATCH_S = 1.0
"""Between two looks."""
FIRST_S = 60.0
"""For the first steps, of which nobody knows how long they take."""
TIMES_LONGEST = 5
"""A step may take so many times as long as the longest that was seen to end."""
LOST_S = 30.0
"""After that, a step that was stuck is given up, and the process with it."""


@dataclass(slots=True)
class StepWatch:
    stuck_s: float
    """A step that takes longer is stuck, but for the two cases above."""
    longest_s: float = 0.0
    """Of the steps that have ended, as far as looks can tell."""
    seen_s: float = 0.0
    """Of the step that runs, the seconds that were watched."""
    _step: int = -1

    def look(self, step: int, took_s: float) -> None:
        """Every WATCH_S: how many steps have begun, and for how long the last of them runs; 0 if it has ended."""
        if step != self._step or not took_s:
            if self._step >= 0 and self.seen_s:
                self.longest_s = max(self.longest_s, self.seen_s)
            self._step, self.seen_s = step, 0.0
        if took_s:
            self.seen_s = min(took_s, self.seen_s + WATCH_S)

    @property
    def limit_s(self) -> float:
        usual_s = self.stuck_s if self._step > 1 else max(self.stuck_s, FIRST_S)
        return max(usual_s, TIMES_LONGEST * self.longest_s)

    @property
    def is_stuck(self) -> bool:
        return self.seen_s > self.limit_s

    @property
    def is_lost(self) -> bool:
        return self.seen_s > self.limit_s + LOST_S
