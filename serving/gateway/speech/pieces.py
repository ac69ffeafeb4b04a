"""Pieces: what an answer says, in order, as small as it becomes known.

Pieces of one kind that follow each other are one: how they are cut depends on how the text came and means nothing.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Content:
    """Not frozen, as one is made per token and that would take twice the time."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """A call begins; `index` counts the calls of one answer."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of a call's arguments, which together are JSON if the model wrote JSON."""

    index: int
    text: str


Piece = Content | Reasoning | ToolStart | ToolArguments
