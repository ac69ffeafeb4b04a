"""InFlight: a dispatched step whose tokens have not been read, and what is to be done when they are."""

from dataclasses import dataclass

import jax
import numpy as np
from numpy.typing import NDArray

from kv.page_table import pages_for
from serving.engine.api import TokenLogprobs
from serving.engine.batch import NOT_FINITE
from serving.engine.logprobs import RowLogprobs
from serving.engine.plan import StepPlan
from serving.engine.pooling import Pooling, PoolingInFlight
from serving.engine.prompt_logprobs import PromptsInFlight, StepLogprobs
from serving.engine.sequence import Sequence
from serving.engine.slots import SlotTable


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    tokens_RI: jax.Array
    """int32, on its way to the host."""
    num_trips: int
    """Columns of it that can hold tokens."""
    num_drafts_r: NDArray[np.int64] | None
    """Guesses of each row that the step checks, if it does."""
    row_r: NDArray[np.intp]
    """Rows whose tokens belong to somebody: decodes, then last chunks."""
    sequences: tuple[Sequence, ...]
    """Whose tokens they are; some may have ended or been preempted meanwhile."""
    slot_r: NDArray[np.intp]
    """Their slots when the step was dispatched."""
    owner_r: NDArray[np.int64]
    """`SlotTable.owner_B` then."""
    watched_r: NDArray[np.bool_]
    """Whether the last token is the last one that the sequence may have, or each of its tokens needs a look."""
    prefilled: tuple[tuple[int, Sequence, int], ...]
    """Rows and sequences with a chunk in this step, and how many of their tokens are in pages then."""
    num_rows: int
    num_tiles: int
    """The size of its work, which its time belongs to."""
    is_timed: bool
    """Whether it does nothing beside."""
    logprobs: RowLogprobs | None
    """None when nobody asked: then they stay on the device."""
    prompts: PromptsInFlight | None
    pooling: PoolingInFlight | None
    dispatched_s: float
    """On the clock of the engine's thread."""

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        slots: SlotTable,
        tokens_RI: jax.Array,
        logprobs: StepLogprobs,
        dispatched_s: float,
        tile_tokens: int,
        pooling: Pooling | None,
    ) -> "InFlight":
        """Before the plan's tokens are counted in `slots`."""
        num_decode = len(plan.decode)
        last = [row for row, chunk in enumerate(plan.prefill) if chunk.is_last]
        row_r, slot_r = np.arange(num_decode), plan.decode
        if last:
            row_r = np.concatenate([row_r, np.asarray(last) + num_decode])
            slot_r = np.concatenate([slot_r, [plan.prefill[row].sequence.slot for row in last]])
        return cls(
            tokens_RI,
            plan.num_trips if plan.drafts_BD is None else 1 + plan.drafts_BD.shape[1],
            None if plan.drafts_BD is None else np.count_nonzero(plan.drafts_BD[slot_r] >= 0, axis=1),
            row_r,
            tuple(slots.at(slot_r)),
            slot_r,
            slots.owner_B[slot_r],
            (slots.num_tokens_B[slot_r] + plan.num_trips >= slots.max_len_B[slot_r]) | slots.watched_B[slot_r],
            tuple((row, c.sequence, c.start + c.length) for row, c in enumerate(plan.prefill, start=num_decode)),
            num_decode + len(plan.prefill),
            sum(pages_for(chunk.length, tile_tokens) for chunk in plan.prefill),
            not plan.catch_up,
            logprobs.rows.start_copy() if slots.logprobs_B.any() else None,
            PromptsInFlight.of(plan, logprobs),
            PoolingInFlight.of(plan, pooling, logprobs.pooled_2SD, tile_tokens),
            dispatched_s,
        )

    def read_tokens(self) -> NDArray[np.int32]:
        """int32[R, num_trips]; waits for the device."""
        return np.asarray(self.tokens_RI)[:, : self.num_trips]

    def is_odd(self, tokens_rI: NDArray[np.int32], slots: SlotTable) -> NDArray[np.bool_]:
        """For each of `sequences`, whether more may be due than to append its tokens: it ends or broke down, has left
        its slot, follows a grammar, or asked for more."""
        if self.num_drafts_r is not None:
            return np.ones(len(self.slot_r), np.bool_)  # each has as many tokens as guesses were right
        stops_Kr = slots.stop_KB.take(self.slot_r, axis=1)
        odd_r = self.watched_r | (slots.owner_B[self.slot_r] != self.owner_r)
        for tokens_r in tokens_rI.T:
            odd_r |= (stops_Kr == tokens_r).any(axis=0) | (tokens_r == NOT_FINITE)
        return odd_r

    def read_logprobs(self) -> dict[str, tuple[TokenLogprobs, ...]]:
        """By request id, one entry for each that asked."""
        if self.logprobs is None:
            return {}
        rows = dict(zip(self.row_r.tolist(), self.sequences, strict=True))
        entries = self.logprobs.read({row: s.request.sampling.logprobs for row, s in rows.items()})
        return {rows[row].request_id: entry for row, entry in entries.items()}
