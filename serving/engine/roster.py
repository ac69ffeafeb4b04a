"""Roster: every sequence of the engine, where it waits or which slot and pages it has, and the one place where it ends.

Owned by the engine's thread. What the device does is the engine's business; this is the host's book of it.
"""

from collections.abc import Iterable

from kv.host_pages import HostPages
from kv.layer_sets import Reach
from kv.page_pool import PagePool
from kv.page_table import PageTable
from kv.prefix_cache import PrefixCache
from serving.engine.api import SequenceOutput, TokenLogprobs
from serving.engine.batch import SlotSettings
from serving.engine.pages import SlotPages
from serving.engine.plan import StepPlan
from serving.engine.sequence import INTERACTIVE, NO_SLOT, Sequence
from serving.engine.siblings import Siblings
from serving.engine.slots import SlotTable
from serving.engine.waiting import WaitingQueue
from serving.errors import ServiceError
from serving.request import FinishReason, Load


class Roster:
    def __init__(
        self,
        pool: PagePool,
        *,
        num_slots: int,
        pages_per_slot: int,
        reach: Reach,
        prefix_cache: bool,
        host: HostPages | None = None,
    ) -> None:
        self._pool = pool
        self._reach = reach
        self.table = PageTable(num_slots, pages_per_slot, reach.num_sets)
        cache = PrefixCache(pool, reach, enabled=prefix_cache, host=host)
        self.pages = SlotPages(pool, cache, self.table, reach, host)
        self.settings = SlotSettings(num_slots)
        self.slots = SlotTable(num_slots)
        self.waiting = WaitingQueue()
        self.num_promoted = 0
        self._siblings = Siblings()
        self._by_id: dict[str, Sequence] = {}
        self._unsaid: dict[str, SequenceOutput] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self._siblings)

    @property
    def load(self) -> Load:
        """A page is counted for all layers, whatever their sets: so it holds as many tokens as it says, or more."""
        return Load(
            num_running=self.slots.num_running,
            num_waiting=self.num_waiting,
            free_slots=self.slots.num_free,
            total_slots=len(self.table.num_pages_B),
            free_pages=self._pool.num_free // self._reach.num_sets,
            total_pages=self._pool.num_usable // self._reach.num_sets,
            page_size=self._reach.page_size,
        )

    def get(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    def add(self, sequence: Sequence) -> None:
        """Into the queue, or behind the one that computes the same prompt."""
        self._by_id[sequence.request_id] = sequence
        first = self._by_id.get(sequence.request.after)
        if first is not None and (self.pages.will_share(first) or first.wants_prompt_logprobs):
            self._siblings.hold(sequence)
        else:
            self.waiting.add(sequence)

    def trim(self) -> None:
        """Give back pages of decoding sequences that have fallen out of the window of their layers."""
        for slot in self.pages.may_trim(self.slots.num_tokens_B).tolist():
            sequence = self.slots.sequences[slot]
            if sequence is not None and self._has_answer(sequence):  # chunks see to theirs as they are read
                self.pages.trim(sequence, len(sequence.token_ids) - 1)

    def commit(self, plan: StepPlan, step: int) -> None:
        """Carry out what a plan says of slots and pages; `step` counts plans."""
        for sequence in plan.promote:
            self._promote(sequence)
        for sequence in plan.preempt:
            self._preempt(sequence, step)
        for admission in plan.admit:
            self.waiting.remove(admission.sequence)
            self.slots.enter(admission.sequence)
            self.settings.set(admission.sequence.slot, admission.sequence)
            self.pages.share(admission.match)
        for admission in plan.admit:
            self.pages.start(admission.sequence, admission.match, admission.num_columns)
        for sequence, num_tokens in plan.fill:
            self.pages.fill(sequence, num_tokens)
        self.pages.grow(plan.grow)
        self.slots.decoded_at_B[plan.decode] = step
        if any(chunk.sequence.is_patient for chunk in plan.prefill):
            self.slots.batch_prompt_at = step
        for chunk in plan.catch_up:
            self.pages.note_drafted(chunk.sequence, chunk.start + chunk.length)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        tokens: tuple[int, ...] = (),
        error: ServiceError | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> SequenceOutput:
        """The one place where a request ends, but for failed steps: slot and pages are freed here."""
        sequence.finish_reason = reason
        del self._by_id[sequence.request_id]
        self.num_promoted -= sequence.is_promoted
        self.release_siblings(sequence)
        if sequence.slot != NO_SLOT:
            self._leave_slot(sequence)
        elif not self._siblings.remove(sequence):
            self.waiting.remove(sequence)
        guesses = sequence.guesses.num_drafted, sequence.guesses.num_accepted
        ended = SequenceOutput(sequence.request_id, tokens, reason, error, sequence.num_cached, logprobs, (), *guesses)
        self._unsaid[sequence.request_id] = ended
        return ended

    def say(self) -> None:
        """All ends have been handed out. Those of a step that raises have not: `drop` tells them."""
        self._unsaid.clear()

    def drop(self, error: ServiceError, *, all_of_them: bool) -> tuple[tuple[SequenceOutput, ...], list[Sequence]]:
        """The ends that were not handed out and those of everyone who had begun, or of all; and who is left, in no slot
        yet. Nothing else is freed: a new roster follows."""
        left = [] if all_of_them else [s for s in self._by_id.values() if s.slot == NO_SLOT and not s.was_admitted]
        begun = self._by_id.keys() - {sequence.request_id for sequence in left}
        failed = [SequenceOutput(name, (), FinishReason.ERROR, error, self._by_id[name].num_cached) for name in begun]
        return (*self._unsaid.values(), *failed), left

    def take_over(self, left: Iterable[Sequence]) -> None:
        """Those that an earlier roster has left."""
        for sequence in left:
            self._by_id[sequence.request_id] = sequence
            self.waiting.add(sequence)
            self.num_promoted += sequence.is_promoted

    def release_siblings(self, first: Sequence) -> None:
        """Those that waited for this one's prompt queue up."""
        for sequence in self._siblings.let_go(first):
            self.waiting.add(sequence)

    def check_integrity(self, max_trips: int) -> None:
        """Assert that pages, slots and queues agree with each other."""
        self.pages.check_integrity()
        self.slots.check_integrity(max_trips)
        self.waiting.check_integrity(max_trips)
        waiting = [*self.waiting.ranked, *self._siblings.all]
        known = [s for s in [*self.slots.sequences, *waiting] if s is not None]
        assert set(map(id, self._by_id.values())) == set(map(id, known))
        assert sum(s.is_promoted for s in known) == self.num_promoted
        occupied_B = self.slots.max_len_B > 0
        assert (occupied_B == (self.table.num_pages_B > 0)).all(), "pages without a sequence, or the other way round"

    def _promote(self, sequence: Sequence) -> None:
        self.num_promoted += 1
        if sequence.slot == NO_SLOT:
            self.waiting.remove(sequence)
            sequence.band = INTERACTIVE
            self.waiting.add(sequence)
        else:
            sequence.band = INTERACTIVE
            self.slots.batch_B[sequence.slot] = False

    def _preempt(self, sequence: Sequence, step: int) -> None:
        """What lies in its pages is computed again, except what the prefix cache still has then."""
        if self.slots.decodes_B[sequence.slot]:
            sequence.waiting_since = step
        sequence.num_pending = int(self.slots.num_tokens_B[sequence.slot]) - len(sequence.token_ids)
        self._leave_slot(sequence)
        self.waiting.add(sequence)

    def _leave_slot(self, sequence: Sequence) -> None:
        """Free slot and pages. A step in flight may still write there: it runs before any step that reuses them."""
        if self._has_answer(sequence):  # all but the newest token that was read went through a step that was read
            self.pages.publish(sequence, len(sequence.token_ids) - 1)
        self.pages.release(sequence)
        self.slots.leave(sequence)

    def _has_answer(self, sequence: Sequence) -> bool:
        """It decodes, and the step that completed its prompt has been read."""
        return bool(self.slots.decodes_B[sequence.slot]) and len(sequence.token_ids) > sequence.num_scheduled
