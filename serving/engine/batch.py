"""A plan as arrays: the finite set of step shapes, and the one packed int32 upload of a step.

A step has R rows, one per sequence, and S prefill tiles of Q tokens. Its flat tokens are R decode tokens (read from
`last_token` on the device; idle for rows that prefill) followed by S * Q prefill tokens. Everything the host has to say
travels in one int32 vector; `BatchLayout` knows where each field lies, on both sides of the upload.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kv.page_table import PageTable, pages_for
from model.adapters import NO_ADAPTER
from serving.engine.plan import StepPlan
from serving.engine.prompt_logprobs import UNASKED, next_tokens
from serving.engine.sequence import Sequence
from serving.engine.slots import STOPS, SlotTable, stop_columns
from serving.errors import EngineFailed

ROW_FIELDS = ("slot", "position", "sample_at", "num_trips", "sample_position",
              "temperature", "top_k", "top_p", "min_p", "seed_high", "seed_low",
          "repetition", "presence", "frequency", "counted", "num_edits", "logprobs", "masked",
              *(f"stop_{k}" for k in range(STOPS)))  # fmt: skip
_SAMPLING = 5  # the fields from here on are copied from the slot's settings
NOTHING = -1
NOT_FINITE = -2
"""In the place of a sampled token: the model gave NaN or infinity for its row. Also for a chunk that samples none."""


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """One compiled program: `rows` sequences and `tiles` prefill tiles (0 for a decode step), or `drafts` guesses for
    each row of a decode step."""

    tiles: int
    rows: int
    drafts: int = 0

    @property
    def num_tokens(self) -> int:
        """Of its rows alone."""
        return self.rows * (1 + self.drafts)

    def __str__(self) -> str:
        if self.drafts:
            return f"verify {self.rows} rows of {self.drafts} guesses"
        return f"mixed {self.rows} rows + {self.tiles} tiles" if self.tiles else f"decode {self.rows} rows"


@dataclass(frozen=True, slots=True)
class Ladder:
    """Sizes that are compiled: `least`, and `factor` times as much until all fits."""

    least: int = 1
    factor: int = 2
    least_tiles: int = 1
    beside_few: bool = True
    """Whether prefill tiles are compiled beside few rows, too."""

    def up_to(self, largest: int) -> list[int]:
        """Rising; the last is `largest`."""
        sizes = [min(self.least, largest)]
        while sizes[-1] < largest:
            sizes.append(min(sizes[-1] * self.factor, largest))
        return sizes


def step_shapes(
    num_slots: int, max_tiles: int, max_drafts: int = 0, ladder: Ladder = Ladder()
) -> tuple[StepShape, ...]:
    """All shapes that are compiled: decode rows up the ladder, with and without guesses if there are any; prefill tiles
    by its factor, beside few or all."""
    rows_up = ladder.up_to(num_slots)
    tiles_up = replace(ladder, least=ladder.least_tiles).up_to(max_tiles)
    decode = [StepShape(0, rows) for rows in rows_up]
    mixed_rows = sorted({min(8, num_slots), num_slots} if ladder.beside_few else {num_slots})
    mixed = [StepShape(tiles, rows) for tiles in tiles_up for rows in mixed_rows]
    verify = [StepShape(0, rows, max_drafts) for rows in rows_up] if max_drafts else []
    return tuple(decode + mixed + verify)


def choose_shape(plan: StepPlan, shapes: tuple[StepShape, ...], tile_tokens: int) -> StepShape:
    """The smallest shape that holds the plan. A missing one is an error, never a compile in service."""
    rows = len(plan.decode) + len(plan.prefill)
    tiles = sum(pages_for(chunk.length, tile_tokens) for chunk in plan.prefill)
    kind = bool(tiles), plan.drafts_BD is not None
    fitting = [s for s in shapes if s.rows >= rows and s.tiles >= tiles and (bool(s.tiles), bool(s.drafts)) == kind]
    if not fitting:
        raise EngineFailed(f"no compiled step shape holds {rows} rows and {tiles} tiles; compiled: {shapes}.")
    return min(fitting)


ArrayT = TypeVar("ArrayT")


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where the fields of one shape's packed vector lie: rows, page rows, tile rows, tile tokens, tile positions, the
    next tokens whose log-probabilities are wanted, guesses, and where there are any, the rows' adapters."""

    shape: StepShape
    pages_per_slot: int
    tile_tokens: int
    has_adapters: bool = False
    num_sets: int = 1
    """Of layers, each with page rows of its own."""

    @property
    def size(self) -> int:
        return sum(rows * columns for rows, columns in self._blocks())

    def _blocks(self) -> tuple[tuple[int, int], ...]:
        R, S, Q = self.shape.rows, self.shape.tiles, self.tile_tokens
        blocks = (len(ROW_FIELDS), R), (self.num_sets * R, self.pages_per_slot), (S, 1), (S, Q), (S, Q), (S, Q)
        return (*blocks, (R, self.shape.drafts), *([(R, 1)] if self.has_adapters else []))

    def split(self, packed: ArrayT) -> tuple[ArrayT, ...]:
        """Views of a packed vector, numpy or traced: fields_FR, pages_RJ, tile_rows_S1, tokens_SQ, positions_SQ,
        next_SQ, drafts_RD, and adapters_R1 where there are any. Page rows of several sets follow each other."""
        views, start = [], 0
        for rows, columns in self._blocks():
            views.append(packed[start : start + rows * columns].reshape(rows, columns))  # type: ignore[index]
            start += rows * columns
        return tuple(views)


class SlotSettings:
    """Sampling parameters per slot as int32 columns, written once when a sequence is admitted."""

    def __init__(self, num_slots: int) -> None:
        self.values_FB: NDArray[np.int32] = np.zeros((len(ROW_FIELDS) - _SAMPLING, num_slots), np.int32)
        self.adapter_B: NDArray[np.int32] = np.zeros(num_slots, np.int32)

    def set(self, slot: int, sequence: Sequence) -> None:
        p, seed = sequence.request.sampling, sequence.seed % 2**64
        temperature, top_p, min_p, *penalties = _float_bits(
            p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty
        )
        seeds = np.asarray([seed >> 32, seed % 2**32], np.uint32).view(np.int32)
        asks = p.has_penalties, sequence.edits_3E.shape[1], p.logprobs is not None, sequence.request.matcher is not None
        stops = stop_columns(sequence)
        adapter = sequence.request.adapter
        self.adapter_B[slot] = NO_ADAPTER if adapter is None else adapter.place + 1
        self.values_FB[:, slot] = (
            temperature,
            min(p.top_k, 2**31 - 1),
            top_p,
            min_p,
            *seeds,
            *penalties,
            *asks,
            *stops,
        )


def _float_bits(*values: float) -> NDArray[np.int32]:
    return np.asarray(values, np.float32).view(np.int32)


def build_batch(
    plan: StepPlan, layout: BatchLayout, table: PageTable, slots: SlotTable, settings: SlotSettings
) -> NDArray[np.int32]:
    """The packed vector of a plan whose sequences all have slots and pages. Rows: decodes first, then chunks."""
    scrap_slot = table.num_slots
    packed: NDArray[np.int32] = np.zeros(layout.size, np.int32)
    fields_FR, pages_RJ, tile_rows_S1, tokens_SQ, positions_SQ, next_SQ, drafts_RD, *adapters = layout.split(packed)
    slot_R, position_R, sample_at_R, num_trips_R, sample_position_R = fields_FR[:_SAMPLING]
    slot_R[:] = scrap_slot
    position_R[:] = sample_at_R[:] = NOTHING
    positions_SQ[:] = NOTHING
    next_SQ[:] = UNASKED

    num_decode = len(plan.decode)
    prefilling = [chunk.sequence.slot for chunk in plan.prefill]
    slot_r = np.concatenate([plan.decode, np.asarray(prefilling, np.intp)]) if prefilling else plan.decode
    num_rows = len(slot_r)
    slot_R[:num_rows] = slot_r
    sample_position_R[:num_rows] = slots.num_tokens_B[slot_r]
    position_R[:num_decode] = sample_position_R[:num_decode] - 1
    sample_at_R[:num_decode] = np.arange(num_decode)
    num_trips_R[:num_decode] = slots.num_due(plan.decode, plan.num_trips)
    np.take(settings.values_FB, slot_r, axis=1, out=fields_FR[_SAMPLING:, :num_rows], mode="clip")
    for of_set, table_BJ in enumerate(table.page_indices_WBJ):
        first = of_set * layout.shape.rows
        np.take(table_BJ, slot_r, axis=0, out=pages_RJ[first : first + num_rows], mode="clip")
    for adapters_R1 in adapters:
        np.take(settings.adapter_B, slot_r, out=adapters_R1[:num_rows, 0], mode="clip")
    if plan.drafts_BD is not None:
        np.take(plan.drafts_BD, slot_r, axis=0, out=drafts_RD[:num_rows], mode="clip")

    tile, Q = 0, layout.tile_tokens
    tokens_T, positions_T = tokens_SQ.reshape(-1), positions_SQ.reshape(-1)
    for row, chunk in enumerate(plan.prefill, start=num_decode):
        at, end = tile * Q, chunk.start + chunk.length
        tokens_T[at : at + chunk.length] = chunk.sequence.token_ids[chunk.start : end]
        positions_T[at : at + chunk.length] = range(chunk.start, end)
        if chunk.sequence.wants_prompt_logprobs:
            next_SQ.reshape(-1)[at : at + chunk.length] = next_tokens(chunk)
        num_tiles = pages_for(chunk.length, Q)
        tile_rows_S1[tile : tile + num_tiles] = row
        tile += num_tiles
        if chunk.is_last:
            sample_at_R[row] = layout.shape.rows + at + chunk.length - 1
            num_trips_R[row] = 1
    return packed
