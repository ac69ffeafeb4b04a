"""StepPlan: what the next step does, and the figures by which it is decided. Values only; `planner` decides."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kv.layer_sets import tokens_ahead
from serving.engine.pages import Match
from serving.engine.sequence import Sequence


def _no_slots() -> NDArray[np.intp]:
    return np.zeros(0, np.intp)


@dataclass(frozen=True, slots=True)
class Limits:
    page_size: int
    tile_tokens: int
    """Prefill is cut into tiles of this many tokens; a tile belongs to one sequence."""
    max_tiles: int
    """Prefill tiles in one step."""
    growth_tokens: int = 64
    """Who is admitted leaves room for so many more tokens of everyone who runs, so that few are preempted."""
    patience: int = 256
    """Steps without a token after which a batch sequence may be promoted."""
    max_promoted: int = 1
    """Promoted sequences at a time: the floor of the batch band, in slots."""
    max_trips: int = 1
    """Tokens that one decode call may give a row."""
    max_drafts: int = 0
    """Tokens of a sequence that may be guessed for one call."""
    max_call_s: float = 0.02
    """How long a decode call of several trips may take: a newcomer waits for it, and its tokens come in one burst."""
    share: float = 1.7
    """How many times longer batch work may make a step in which interactive sequences decode."""
    floor_every: int = 6
    """One step of so many may have batch prompts."""
    share_floor: float = 4.0
    """How many times longer batch work may make that step."""

    @property
    def chunk_tokens(self) -> int:
        """The most of a prompt that one step computes."""
        return self.max_tiles * self.tile_tokens

    @property
    def tokens_ahead(self) -> int:
        """As `kv.layer_sets.Reach` means it."""
        return tokens_ahead(self.chunk_tokens, self.max_trips, self.max_drafts)


class PageReader(Protocol):
    """What the planner may ask about pages; `SlotPages` answers."""

    @property
    def num_free(self) -> int: ...

    @property
    def num_sets(self) -> int:
        """Pages that a column takes: one in each set of layers (`kv.layer_sets`)."""
        ...

    @property
    def num_copies_back(self) -> int:
        """Pages that a step may bring back from the host's memory."""
        ...

    @property
    def num_pages_B(self) -> NDArray[np.int32]:
        """Columns of each slot."""
        ...

    def match(self, sequence: Sequence) -> Match: ...

    def num_new(self, num_columns: int, match: Match) -> int: ...

    def num_to_fill(self, sequence: Sequence, num_tokens: int) -> int: ...

    def num_releasable(self, sequence: Sequence) -> int: ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + length) of one sequence, computed in this step."""

    sequence: Sequence
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        """Whether this chunk completes the prompt, so that the step samples a token."""
        return self.start + self.length == len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class Admission:
    sequence: Sequence
    match: Match
    """Pages to share. All admissions share before anyone allocates, so that none of these is evicted."""
    num_columns: int
    """Pages' worth of tokens, those that it shares included."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """To be committed in the order of the fields."""

    promote: tuple[Sequence, ...] = ()
    """Batch sequences, waiting or prefilling, that count as interactive from the next plan on."""
    preempt: tuple[Sequence, ...] = ()
    admit: tuple[Admission, ...] = ()
    """In the order of their rank, from the best."""
    fill: tuple[tuple[Sequence, int], ...] = ()
    """Prefilling sequences that get pages for so many tokens to come, in sets of layers where they lack them."""
    grow: NDArray[np.intp] = field(default_factory=_no_slots)
    """Slots of decoding sequences that need pages, rising; a slot stands here once per column."""
    decode: NDArray[np.intp] = field(default_factory=_no_slots)
    """Slots that decode, rising."""
    prefill: tuple[Chunk, ...] = ()
    num_trips: int = 1
    """Tokens that each of `decode` gets, unless it ends before; 1 beside prefill and guesses."""
    drafts_BD: NDArray[np.int32] | None = None
    """By slot, guesses that the call checks, of which the right ones come on top; see `speculation`."""
    catch_up: tuple[Chunk, ...] = ()
    """Tokens of decoding sequences that a draft model reads first."""

    @property
    def has_work(self) -> bool:
        return bool(len(self.decode) or self.prefill)
