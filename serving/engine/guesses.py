"""Guesses: how one sequence may go on, and how often that came true."""

from dataclasses import dataclass, field

from serving.engine.ngrams import NgramIndex

HOPE = 0.7  # how often a guess comes true, as long as nobody knows; too low, and nobody would find out
_WEIGHT = 0.25  # of the newest measurement


def learn_rate(rate: float, num_drafted: int, num_accepted: int, weight: float) -> float:
    """A running mean of the chance that a guessed token comes true when those before it did, after a call that checked
    `num_drafted` guesses, of which the first `num_accepted` were right."""
    num_tried = min(num_accepted + 1, num_drafted)
    return rate + weight * (num_accepted / num_tried - rate)


@dataclass(slots=True)
class Guesses:
    """Of one sequence."""

    rate: float = HOPE
    """The chance that a guessed token comes true when those before it did, a running mean. As long as the sequence had
    no guesses, what `Speculation` knows of others."""
    num_drafted: int = 0
    """Tokens that were guessed and checked."""
    num_accepted: int = 0
    """Those that came true."""
    ngrams: NgramIndex = field(default_factory=NgramIndex)

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """A call checked `num_drafted` guesses, 1 or more, and the first `num_accepted` were right."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.rate = learn_rate(self.rate, num_drafted, num_accepted, _WEIGHT)

    def expect(self, num_drafted: int) -> float:
        """How many of so many guesses will be right: those before each must be, too."""
        return sum(self.rate**i for i in range(1, num_drafted + 1))
