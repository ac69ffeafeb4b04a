"""What the next step does. `plan_step` is a pure function: it reads sequences, changes nothing and has no clock.

Order of service: decode rows first (everyone who is streaming goes on), then prefill chunks of admitted sequences,
then admissions, first come first served. When pages run out for decoding, the youngest sequence is preempted and
computed again later; the oldest can always go on, so every sequence ends.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from kv.page_table import pages_for
from serving.engine.pages import Match
from serving.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    page_size: int
    tile_tokens: int
    """Prefill is cut into tiles of this many tokens; a tile belongs to one sequence."""
    max_tiles: int
    """Prefill tiles in one step."""


class PageReader(Protocol):
    """What the planner may ask about pages; `SlotPages` answers."""

    @property
    def num_free(self) -> int: ...

    def match(self, sequence: Sequence) -> Match: ...

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
        return self.start + self.length == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class Admission:
    sequence: Sequence
    cached: tuple[int, ...]
    """Pages to share, in order. All admissions share before anyone allocates, so that none of these is evicted."""
    num_pages: int
    """Pages to allocate behind them."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    preempt: tuple[Sequence, ...] = ()
    """Youngest first."""
    admit: tuple[Admission, ...] = ()
    grow: tuple[Sequence, ...] = ()
    """Decoding sequences that need one more page."""
    decode: tuple[Sequence, ...] = ()
    prefill: tuple[Chunk, ...] = ()

    @property
    def has_work(self) -> bool:
        return bool(self.decode or self.prefill)


def plan_step(
    waiting: Iterable[Sequence], running: list[Sequence], free_slots: int, pages: PageReader, limits: Limits
) -> StepPlan:
    """`running` is in order of arrival. Pages promised never exceed pages free plus pages that the preempted free."""
    decode, grow, preempt, free_pages = _plan_decode(running, pages, limits)
    gone = set(map(id, preempt))
    prefill, tiles_left = _plan_chunks([s for s in running if s.wants_prefill and id(s) not in gone], limits)
    admit: list[Admission] = []
    if not preempt:  # whoever was just preempted comes first
        num_running = len(running)
        admit, chunks = _plan_admissions(waiting, num_running, free_slots, free_pages, tiles_left, pages, limits)
        prefill += chunks
    return StepPlan(tuple(preempt), tuple(admit), tuple(grow), tuple(decode), tuple(prefill))


def _plan_decode(
    running: list[Sequence], pages: PageReader, limits: Limits
) -> tuple[list[Sequence], list[Sequence], list[Sequence], int]:
    """Rows that decode, those that need a page for it, those preempted to find the pages, and pages left."""
    decode: list[Sequence] = []
    grow: list[Sequence] = []
    preempt: list[Sequence] = []
    free_pages = pages.num_free
    candidates = list(running)  # the youngest, last, is preempted first
    for sequence in running:
        if sequence in preempt:
            break  # everyone younger is preempted too, or about to finish
        if not sequence.wants_decode:
            continue
        if pages_for(sequence.num_tokens, limits.page_size) > sequence.num_pages:
            while free_pages == 0 and (victim := _youngest(candidates)) is not None:
                candidates.remove(victim)
                preempt.append(victim)
                free_pages += pages.num_releasable(victim)
                if victim is sequence:
                    break
            if sequence in preempt or free_pages == 0:
                continue
            free_pages -= 1
            grow.append(sequence)
        decode.append(sequence)
    return [s for s in decode if s not in preempt], [s for s in grow if s not in preempt], preempt, free_pages


def _youngest(candidates: list[Sequence]) -> Sequence | None:
    """The last to arrive among those that still have work: the others free their pages by finishing."""
    return next((s for s in reversed(candidates) if not s.is_exhausted), None)


def _plan_chunks(sequences: Iterable[Sequence], limits: Limits) -> tuple[list[Chunk], int]:
    """Chunks for admitted sequences in order of arrival, and the tiles that are left."""
    chunks: list[Chunk] = []
    tiles_left = limits.max_tiles
    for sequence in sequences:
        if tiles_left == 0:
            break
        chunk = _chunk(sequence, sequence.num_scheduled, tiles_left, limits)
        chunks.append(chunk)
        tiles_left -= pages_for(chunk.length, limits.tile_tokens)
    return chunks, tiles_left


def _plan_admissions(
    waiting: Iterable[Sequence],
    num_running: int,
    free_slots: int,
    free_pages: int,
    tiles_left: int,
    pages: PageReader,
    limits: Limits,
) -> tuple[list[Admission], list[Chunk]]:
    admit: list[Admission] = []
    chunks: list[Chunk] = []
    for sequence in waiting:
        # A preempted sequence whose last token is still on its way cannot be prefilled yet.
        if tiles_left == 0 or free_slots == 0 or sequence.num_pending:
            break
        match = pages.match(sequence)
        new = pages_for(sequence.num_tokens + 1, limits.page_size) - len(match.pages)
        need = new + match.num_idle
        # One page for every other sequence keeps them from being preempted at their next page border.
        others = num_running + len(admit)
        if need + others > free_pages and (others or need > free_pages):
            break
        chunk = _chunk(sequence, len(match.pages) * limits.page_size, tiles_left, limits)
        admit.append(Admission(sequence, match.pages, new))
        chunks.append(chunk)
        free_slots -= 1
        free_pages -= need
        tiles_left -= pages_for(chunk.length, limits.tile_tokens)
    return admit, chunks


def _chunk(sequence: Sequence, start: int, tiles_left: int, limits: Limits) -> Chunk:
    length = min(sequence.num_tokens - start, tiles_left * limits.tile_tokens)
    return Chunk(sequence, start, length)
