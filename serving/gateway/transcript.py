"""Transcript: the one way from a replica's events to what is said, for streams and whole answers of every protocol."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from serving.gateway.speech.pieces import Piece
from serving.gateway.speech.speech import SpeechPlan
from serving.replica.events import Delta, Finished, TokenLogprob
from serving.request import Usage


class Said(NamedTuple):
    """What one event adds to one of the answers. With `reason` the answer is complete. (One is made per token: a named
    tuple takes a third of the time of a frozen dataclass.)"""

    choice: int = 0
    pieces: Sequence[Piece] = ()
    logprobs: Sequence[TokenLogprob] = ()
    """Of all tokens, whatever they say."""
    prompt: Sequence[TokenLogprob] = ()
    reason: str | None = None
    num_tokens: int = 0
    usage: Usage | None = None
    """The replica's count of an answer that is complete."""
    is_cut: bool = False
    """The answer has ended within a call, which nobody may run."""


_said: Callable[[tuple[Any, ...]], Said] = partial(tuple.__new__, Said)
"""From all its fields, without the Python frame of its constructor."""


class Transcript:
    """Of all answers to one prompt."""

    def __init__(self, plan: SpeechPlan, num_choices: int, *, in_thought: bool = False) -> None:
        self._speeches = [plan.new_speech(in_thought=in_thought) for _ in range(num_choices)]
        self._finished: list[Finished] = []

    @property
    def is_complete(self) -> bool:
        return len(self._finished) == len(self._speeches)

    @property
    def finished(self) -> Sequence[Finished]:
        return self._finished

    def hear(self, event: Delta | Finished) -> Said:
        if isinstance(event, Delta):
            text, num_tokens, logprobs, choice, prompt, _ = event
            return _said((choice, self._speeches[choice].push(text), logprobs, prompt, None, num_tokens, None, False))
        speech = self._speeches[event.choice]
        self._finished.append(event)
        rest = speech.finish()
        reason = speech.finish_reason(event.reason)
        return Said(event.choice, rest, reason=reason, usage=event.usage, is_cut=speech.is_cut)

    def hear_text(self, choice: int, text: str, num_tokens: int) -> Said:
        """Of a delta that has nothing else."""
        return _said((choice, self._speeches[choice].push(text), (), (), None, num_tokens, None, False))
