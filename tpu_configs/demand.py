"""Demand: what a fleet must give, and to whom in what time."""

from dataclasses import dataclass, fields

from serving.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Demand:
    rps: float
    """Requests per second."""
    concurrent: int
    """Answers that are being written at once."""
    prompt: int
    """Tokens, on average."""
    answer: int
    ttft_s: float
    """Longest wait for a first token."""
    itl_s: float
    """Longest wait between two tokens."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ConfigError(f"{field.name} must be positive, got {getattr(self, field.name)}.")

    @property
    def tokens_per_s(self) -> float:
        return self.rps * self.answer

    @property
    def context(self) -> float:
        """Tokens of a sequence, on average over its answer."""
        return self.prompt + self.answer / 2
