"""Sequence: one request inside the engine. Mutable, and touched by the engine's thread alone.

Its tokens, in order, and who knows them:

    |<------- token_ids: the host has them ------->|<- pending --->|
    |<- prompt: num_prompt ->|<- answer, read ---->|<- on device ->|

A step that samples for the sequence adds pending tokens, which the host reads one step later. What changes with
every decode step of a running sequence stands in the columns of `slots.SlotTable`, not here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kv.page_keys import PageKeys
from serving.engine.api import EngineRequest
from serving.engine.edits import NO_EDITS
from serving.engine.guesses import Guesses
from serving.engine.history import History
from serving.request import FinishReason, Priority

NO_SLOT = -1
INTERACTIVE, BATCH = BANDS = (0, 1)


@dataclass(slots=True, eq=False)
class Sequence:
    request: EngineRequest
    max_tokens: int
    """Answer tokens at most; prompt plus this fits the context."""
    seed: int
    keys: PageKeys
    """Names of its full pages, for the prefix cache."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the answer: EOS unless ignored, and the request's own."""
    edits_3E: NDArray[np.int32] = field(default_factory=lambda: NO_EDITS)
    """What is added to its logits; see `edits`."""
    arrival: int = 0
    """Counts requests in the order in which they came."""
    waiting_since: int = 0
    """The step since which it has got no token: submitted, or preempted while it decoded."""
    token_ids: list[int] = field(default_factory=list)
    request_id: str = field(init=False)
    num_prompt: int = field(init=False)
    max_len: int = field(init=False)
    """Tokens, prompt included, with which it is complete."""
    band: int = field(init=False)
    """INTERACTIVE or BATCH; a batch sequence that waited long is promoted to INTERACTIVE."""
    num_scheduled: int = 0
    """Tokens whose keys and values prefill has put into pages, or is about to; decoding does not change it."""
    num_pending: int = 0
    """While it waits: tokens of a step in flight that it was preempted before, and which have not been read."""
    slot: int = NO_SLOT
    guesses: Guesses = field(default_factory=Guesses)
    """How its text may go on; used only where the engine speculates."""
    num_drafted: int = 0
    """Tokens, from the first, that the draft model has read into its pages, or is about to."""
    num_published: int = 0
    """Pages, from the first, that the prefix cache knows."""
    was_admitted: bool = False
    """It has or had a slot."""
    num_cached: int = 0
    """Prompt tokens that were found in the cache when it was first admitted."""
    num_prompt_told: int = 0
    """Prompt tokens, from the second on, whose log-probabilities were handed out; counted only if they are wanted."""
    history: History = field(default_factory=History)
    pooled_D: NDArray[np.float32] | None = None
    """What its embedding is made of, as far as it has been computed; only if one is wanted."""
    num_pooled: int = 0
    """Prompt tokens, from the first, that are in it."""
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.token_ids = self.token_ids or list(self.request.token_ids)
        self.request_id = self.request.request_id
        self.num_prompt = len(self.request.token_ids)
        self.max_len = self.num_prompt + self.max_tokens
        self.band = BATCH if self.is_patient else INTERACTIVE

    def take(self, tokens: Iterable[int]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append tokens up to one with which the answer ends; returns those, and why it ends."""
        start, reason = len(self.token_ids), None
        for token in tokens:
            self.token_ids.append(token)
            if token in self.stop_ids:
                reason = FinishReason.STOP
            elif len(self.token_ids) == self.max_len:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        return tuple(self.token_ids[start:]), reason

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some are still to be handed out."""
        return self.request.sampling.prompt_logprobs is not None and self.num_prompt_told < self.num_prompt - 1

    @property
    def wants_pooling(self) -> bool:
        """Some of its embedding is still to be computed."""
        return self.request.embed and self.num_pooled < self.num_prompt

    @property
    def num_shareable(self) -> int:
        """Tokens, from the first, that need not go through a step if others have computed them."""
        if self.wants_pooling:
            return 0
        return self.num_prompt_told if self.wants_prompt_logprobs else len(self.token_ids) - 1

    @property
    def is_patient(self) -> bool:
        """It was asked for as batch work, whatever its band is by now."""
        return self.request.priority is Priority.BATCH

    @property
    def is_promoted(self) -> bool:
        return self.band == INTERACTIVE and self.is_patient


def rank(sequence: Sequence) -> tuple[int, int]:
    """The lowest is served first, the highest preempted first: interactive before batch, then first come first served.

    Fairness among tenants would stand between the two. Ranks are unique, and change by promotion only.
    """
    return sequence.band, sequence.arrival
