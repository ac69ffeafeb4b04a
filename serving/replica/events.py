"""What a replica tells about one request, as the gateway sees it: one Accepted, any number of Deltas, one Finished.

An error takes the place of what is left and is raised, never yielded. Plain data, imports no JAX.
"""

from dataclasses import dataclass

from serving.request import FinishReason, Usage


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request passed the checks at the door; from here on it only fails if the service does."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New text. `num_tokens` counts tokens that became known, also while their text is still held back."""

    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    usage: Usage


Event = Accepted | Delta | Finished
