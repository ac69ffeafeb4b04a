"""What a replica tells about one request, as the gateway sees it: one Accepted, any number of Deltas, one Finished for
each of its answers.

An error takes the place of what is left and is raised, never yielded. Plain data, imports no JAX.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from serving.errors import ServiceError
from serving.request import FinishReason, Phases, Usage


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request passed the checks at the door; from here on it only fails if the service does."""

    prompt_tokens: int
    in_thought: bool = False
    """The prompt has opened the model's thought: the answer begins within it."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of an answer, or of its prompt, with natural logarithms of the model's own probabilities."""

    token: bytes
    """Its text in UTF-8; not every token is a whole text."""
    logprob: float | None
    """None for a prompt's first token."""
    text_offset: int
    """Characters of the answer before it."""
    top: tuple[tuple[bytes, float], ...] = ()
    """The most likely tokens at its place, falling."""
    token_id: int = 0
    """Told of prompts only, as the next two."""
    rank: int = 0
    """Its place among all tokens, from 1."""
    top_ids: tuple[int, ...] = ()


class Delta(NamedTuple):
    """New text. `num_tokens` counts tokens that became known, also while their text is still held back.

    One is made per token: a named tuple takes a third of the time of a frozen dataclass.
    """

    text: str
    num_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    """If asked for: of the tokens whose text became complete."""
    choice: int = 0
    """Which of the answers to the prompt."""
    prompt: tuple[TokenLogprob, ...] = ()
    """If asked for: the prompt's own tokens, all before the first of the answer; if echoed, their text is in `text`."""
    embedding: bytes = b""
    """If asked for, once: the prompt's, of length 1, as float32 in little-endian order."""


plain_delta: Callable[[tuple[Any, ...]], Delta] = partial(tuple.__new__, Delta)
"""From all its fields, without the Python frame of its constructor."""


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    usage: Usage
    choice: int = 0
    phases: Phases | None = None


Event = Accepted | Delta | Finished


@dataclass(frozen=True, slots=True)
class Ending:
    """How one answer ended, as the replica knows it; `error` is what a gateway sees in place of a Finished."""

    reason: FinishReason
    usage: Usage = Usage()  # noqa: RUF009 - frozen
    error: ServiceError | None = None
    phases: Phases | None = None
    """None for one whose prompt was never computed."""
