"""Sequence: one request inside the engine. Mutable, and touched by the engine's thread alone.

Its tokens, in order, and who knows them:

    |<------- token_ids: the host has them ------->|<- num_pending ->|
    |<- prompt: num_prompt ->|<- answer, read ---->|<- on device --->|
    |<----- num_scheduled: keys and values are in pages ---->|

A step that samples for the sequence adds one pending token, which the host reads one step later. `on_device` says that
the newest token lies in the device's `last_token[slot]`, so that the next step can be a decode row.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kv.page_keys import PageKeys
from serving.engine.api import EngineRequest
from serving.engine.edits import NO_EDITS
from serving.request import FinishReason

NO_SLOT = -1


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
    token_ids: list[int] = field(default_factory=list)
    num_scheduled: int = 0
    num_pending: int = 0
    on_device: bool = False
    slot: int = NO_SLOT
    num_pages: int = 0
    num_published: int = 0
    """Pages, from the first, that the prefix cache knows."""
    num_cached: int | None = None
    """Prompt tokens that were found in the cache when it was first admitted."""
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.token_ids = self.token_ids or list(self.request.token_ids)

    @property
    def num_prompt(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def num_to_compute(self) -> int:
        return self.num_tokens - self.num_scheduled

    @property
    def is_exhausted(self) -> bool:
        """All answer tokens are sampled or being sampled: nothing more to schedule."""
        return self.num_tokens - self.num_prompt >= self.max_tokens

    @property
    def wants_decode(self) -> bool:
        return self.on_device and not self.is_exhausted

    @property
    def wants_prefill(self) -> bool:
        return not self.on_device and not self.is_exhausted

    def reset(self) -> None:
        """Forget what lies in pages: after preemption everything is computed again."""
        self.num_scheduled = 0
        self.on_device = False
        self.slot = NO_SLOT
        self.num_pages = self.num_published = 0
