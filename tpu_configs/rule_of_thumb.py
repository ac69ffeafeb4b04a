"""The rule that everything here refines: decode reads all weights in every step, so bandwidth rules."""

import math
from dataclasses import dataclass

from tpu_configs.plan import Line


@dataclass(frozen=True, slots=True)
class Thumb:
    """A replica as three numbers."""

    weight_bytes: float
    bytes_per_s: float
    """Memory bandwidth of all its chips together."""
    rows: int

    @property
    def step_s(self) -> float:
        return self.weight_bytes / self.bytes_per_s

    @property
    def tokens_per_s(self) -> float:
        return self.rows / self.step_s

    def replicas(self, tokens_per_s: float) -> int:
        return math.ceil(round(tokens_per_s / self.tokens_per_s, 6))

    def lines(self, rps: float, answer: int) -> tuple[Line, ...]:
        """Keys and values, links, prompts and spares are left out."""
        wanted = rps * answer
        return (
            Line(
                "a step reads all weights",
                f"{self.weight_bytes / 1e9:,g} GB / {self.bytes_per_s / 1e12:g} TB/s",
                f"{self.step_s * 1e3:,.1f} ms",
            ),
            Line(
                "one replica", f"{self.rows} rows / {self.step_s * 1e3:,.1f} ms", f"{self.tokens_per_s:,.0f} tokens/s"
            ),
            Line("demand", f"{rps:,g} requests/s x {answer} tokens", f"{wanted:,.0f} tokens/s"),
            Line("replicas", f"{wanted:,.0f} / {self.tokens_per_s:,.0f}", f"{self.replicas(wanted):,}"),
        )
