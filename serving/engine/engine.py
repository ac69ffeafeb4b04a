"""Engine: plan, dispatch, commit. Owned by one thread; knows token ids, nothing about text.

`step` dispatches the next device call before it reads the tokens of the last one, so the device never waits for the
host. What the host does not know yet (the newest token of each sequence) stays on the device, indexed by slot. A
sequence that turns out to have ended may get tokens too many, which are dropped.
"""

from collections.abc import Callable, Iterable
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from kv.host_pages import MOST_COPIES, HostPages
from kv.layer_sets import Reach
from kv.page_pool import PagePool
from model.tree import Params
from serving.engine.adapter_bank import AdapterForm
from serving.engine.api import EngineRequest, SequenceOutput, StepNews, StepStats
from serving.engine.batch import StepShape, build_batch, choose_shape
from serving.engine.call_times import CallTimes
from serving.engine.commit import commit_tokens
from serving.engine.counts import EngineCounts
from serving.engine.drafters import ModelDrafter, TextDrafter
from serving.engine.grammar import MaskWriter
from serving.engine.in_flight import InFlight
from serving.engine.intake import Intake
from serving.engine.plan import Limits, StepPlan
from serving.engine.planner import plan_step
from serving.engine.pooling import Pooling
from serving.engine.programs import Programs
from serving.engine.roster import Roster
from serving.engine.sequence import Sequence
from serving.engine.slot_state import sequence_packets
from serving.engine.speculation import NO_DRAFTS, Drafts, Speculation
from serving.engine.step_clock import StepClock
from serving.engine.step_ring import StepRecord, StepRing
from serving.errors import DeadlineExceeded, Overloaded, ServiceError
from serving.request import FinishReason, Load


class Engine:
    def __init__(
        self,
        programs: Programs,
        pool: PagePool,
        limits: Limits,
        *,
        eos_token_ids: Iterable[int],
        max_seq_len: int,
        max_waiting: int,
        draw_seed: Callable[[int], int],
        overlap: bool = True,
        prefix_cache: bool = True,
        trip_s: float | None = None,
        verify_s: float | None = None,
        pooling: Pooling | None = None,
        num_host_pages: int = 0,
    ) -> None:
        """`draw_seed(bits)` gives a random seed to a request that names none. `overlap=False` reads every step at once:
        the reference that the overlapped engine must equal. `trip_s` says how long one token for all takes, and
        `verify_s` a call that checks guesses, instead of a measurement. `pooling` is how embeddings are made, if any
        are. `num_host_pages` evicted pages of the prefix cache are kept in the host's memory."""
        spec = programs.spec
        assert limits.max_trips <= spec.max_trips, "the programs have fewer trips than the planner may ask for"
        assert pooling is None or spec.embeds, "the programs make no embeddings"
        assert spec.draft is None or spec.sets is None, "a draft model's pages have the numbers of all layers'"
        self._pooling = pooling
        self._reach = Reach(spec.windows, limits.page_size, limits.tokens_ahead)
        self.max_seq_len = self._reach.longest(pool.num_usable, max_seq_len)
        self._intake = Intake(eos_token_ids, self.max_seq_len, limits.page_size, draw_seed)
        self.vocab_size = spec.config.vocab_size
        self._programs = programs
        self._limits = limits
        self._max_waiting = max_waiting
        self._overlap = overlap
        assert not num_host_pages or programs.copies_pages, "the programs copy no pages"
        self._prefix_cache, self._num_host_pages = prefix_cache, num_host_pages
        self._num_pages = pool.num_usable + 1
        self._roster = self._new_roster(pool)
        self._in_flight: InFlight | None = None
        self._clock = StepClock()
        self._times = CallTimes(self._clock, trip_s, verify_s)
        drafter = TextDrafter() if programs.draft is None else ModelDrafter(programs.draft.spec.max_tiles)
        self._speculation = Speculation(limits.max_drafts, drafter) if limits.max_drafts else None
        self._mask_writer = MaskWriter()
        self.ring = StepRing()
        self._counts = EngineCounts()
        self._num_plans = 0
        self.digest: int | None = None
        """Of all that went to the device and of all tokens that came back, if it is set to 0 before the first step."""

    @property
    def has_work(self) -> bool:
        return bool(self._roster or self._in_flight)

    @property
    def load(self) -> Load:
        return self._roster.load

    @property
    def stats(self) -> StepStats:
        return self._counts.stats(self._clock, len(self._roster.pages.host))

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises Overloaded when the queue is full, PromptTooLong when it can never fit."""
        if (num_waiting := self._roster.num_waiting) >= self._max_waiting:
            raise Overloaded(f"{num_waiting} requests are waiting already, the limit; try again later.")
        self._roster.add(self._intake.make(request, self._num_plans))

    def abort(self, request_id: str) -> SequenceOutput | None:
        """End a request now; its slot and pages are free for the very next step."""
        sequence = self._roster.get(request_id)
        if sequence is None:
            return None
        ended = self._roster.finish(sequence, FinishReason.ABORT)
        self._roster.say()
        return ended

    def recover(self, error: ServiceError) -> tuple[SequenceOutput, ...]:
        """Start anew after a step that raised, wherever it stood: empty arrays on the device, an empty pool. Requests
        that had begun end with `error`; those that never had a slot wait on.

        Raises what the device raises when it cannot even hold empty arrays; then nothing has ended yet.
        """
        self._counts.num_failed_steps += 1
        self._programs.reset()
        return self._start_anew(error, all_of_them=False)

    def fail_all(self, error: ServiceError) -> tuple[SequenceOutput, ...]:
        """End every request with an error, in whatever state a step has left the engine."""
        return self._start_anew(error, all_of_them=True)

    def _start_anew(self, error: ServiceError, *, all_of_them: bool) -> tuple[SequenceOutput, ...]:
        outputs, left = self._roster.drop(error, all_of_them=all_of_them)
        self._in_flight = None
        self._roster = self._new_roster(PagePool(self._num_pages))
        self._roster.take_over(left)
        return outputs

    def _new_roster(self, pool: PagePool) -> Roster:
        spec = self._programs.spec
        return Roster(
            pool,
            num_slots=spec.num_slots,
            pages_per_slot=spec.pages_per_slot,
            reach=self._reach,
            prefix_cache=self._prefix_cache,
            host=HostPages(self._num_host_pages, MOST_COPIES),
        )

    def step(self, now: float = 0.0, took_s: float | None = None) -> StepNews:
        """Dispatch the next step, then hand out the tokens of the one before. Deadlines before `now`, in monotonic
        seconds, have passed. `took_s` is another engine's, to be taken for this one's."""
        self._clock.start_step()
        self._times.learn(self.took_s if took_s is None else took_s)
        late = [self._finish_late(sequence, now) for sequence in self._roster.waiting.overdue(now)]
        self._roster.trim()
        plan = self._plan()
        self._commit_plan(plan)
        dispatched = self._dispatch(plan) if plan.has_work else None
        if self._overlap:
            dispatched, self._in_flight = self._in_flight, dispatched
        news = StepNews()
        if dispatched is not None:
            tokens_RI = self._clock.wait_for(dispatched.read_tokens)
            self._add_to_digest(tokens_RI)
            self._times.note(dispatched, tokens_RI, beside_copies=self._roster.pages.host.read())
            news = commit_tokens(dispatched, tokens_RI, self._roster, self._counts, self._speculation)
        self.ring.end(*self._clock.end_step())
        self._roster.say()
        return news.after(late)

    @property
    def spare_s(self) -> float:
        """Seconds for which the next step may still wait for newcomers: see `CallTimes.spare_s`."""
        return self._times.spare_s(self._in_flight)

    @property
    def took_s(self) -> float:
        """Seconds of the newest call that has been read: what the next step learns from it."""
        return self._times.took_s

    @property
    def adapters(self) -> AdapterForm | None:
        """Of the adapters for which there are places; None without any."""
        return None if self._programs.adapters is None else self._programs.adapters.form

    def write_adapter(self, place: int, adapter: Params) -> None:
        """Write what `AdapterForm.load` gave into a place that no sequence uses, before the next step."""
        self._programs.write_adapter(place, adapter)

    def check_integrity(self) -> None:
        """Assert that pages, slots and queues agree with each other."""
        self._roster.check_integrity(self._limits.max_trips)

    def _plan(self) -> StepPlan:
        self._num_plans += 1
        roster = self._roster
        trip_s = self._times.trips.estimate(roster.slots.num_running)
        return plan_step(
            roster.waiting.ranked,
            roster.slots,
            roster.pages,
            self._limits,
            self._num_plans,
            roster.num_promoted,
            trip_s,
            *self._draft(trip_s),
            self._times.costs,
        )

    def _draft(self, trip_s: float) -> Drafts:
        """Guesses for the next call; none for a plain one, as when somebody waits."""
        if (
            self._speculation is None
            or len(self._roster.waiting)
            or (self._roster.slots.unfinished_B & ~self._roster.slots.decodes_B).any()
        ):
            return NO_DRAFTS
        return self._speculation.draft(
            self._roster.slots, trip_s, self._times.verify.estimate(self._roster.slots.num_running)
        )

    def _commit_plan(self, plan: StepPlan) -> None:
        self._counts.num_preemptions += len(plan.preempt)
        self._roster.commit(plan, self._num_plans)
        self._copy_pages()
        if plan.catch_up and self._programs.draft is not None:
            self._programs.draft.catch_up(plan.catch_up, self._roster.table)
        for admission in plan.admit:
            sequence = admission.sequence
            for packet in sequence_packets(sequence):
                self._programs.write_slot(packet)
            if not sequence.was_admitted:
                sequence.was_admitted, sequence.num_cached = True, sequence.num_scheduled
                sequence.history.admit(self._counts.num_steps + 1)
                if self._roster.pages.enabled:
                    self._counts.count_lookup(sequence, sequence.num_cached)
                if self._num_host_pages:
                    num_back = admission.match.num_columns_away * self._limits.page_size
                    self._counts.count_host_lookup(sequence.num_prompt - sequence.num_cached + num_back, num_back)

    def _copy_pages(self) -> None:
        """To the host what was evicted, before anything is written there, and back what is to be read."""
        pages = self._roster.pages
        if copies := pages.take_copies():
            arrays = self._programs.take_pages([page for _, page in copies.out])
            for (name, _), of_page in zip(copies.out, arrays, strict=True):
                pages.host.put(name, of_page)
            self._programs.put_pages([page for page, _ in copies.back], [of_page for _, of_page in copies.back])

    def _dispatch(self, plan: StepPlan) -> InFlight:
        shape = choose_shape(plan, self._programs.shapes, self._limits.tile_tokens)
        self.ring.add(StepRecord.of(plan, str(shape), self._counts.num_steps, self.load))
        packed = build_batch(
            plan, self._programs.spec.layout(shape), self._roster.table, self._roster.slots, self._roster.settings
        )
        self._add_to_digest(packed)
        results = self._programs.run(shape, packed, self._write_masks(plan, shape))
        self._roster.pages.host.dispatched()
        step = InFlight.of(
            plan, self._roster.slots, *results, self._clock.now(), self._limits.tile_tokens, self._pooling
        )
        self._counts.count_plan(plan)
        self._roster.slots.num_tokens_B[plan.decode] += self._roster.slots.num_due(plan.decode, plan.num_trips)
        self._roster.slots.unread_B[step.slot_r] = self._roster.slots.grammar_B[step.slot_r]
        if step.num_drafts_r is not None:  # how many tokens a row has then, the device alone knows
            self._roster.slots.unread_B[step.slot_r[step.num_drafts_r > 0]] = True
        for chunk in plan.prefill:
            chunk.sequence.num_scheduled += chunk.length
            if chunk.is_last:
                self._roster.slots.num_tokens_B[chunk.sequence.slot] += 1
                self._roster.slots.decodes_B[chunk.sequence.slot] = True
        return step

    def _write_masks(self, plan: StepPlan, shape: StepShape) -> NDArray[np.int32] | None:
        """What grammars allow in a step's rows, found while the device works on the step before; None without any."""
        if not self._roster.slots.grammar_B.any():  # the usual case
            return None
        rows = [
            *self._roster.slots.at(plan.decode),
            *(chunk.sequence if chunk.is_last else None for chunk in plan.prefill),
        ]
        matchers = [(s.request.matcher, row) for row, s in enumerate(rows) if s and s.request.matcher]
        if not matchers:
            return None
        masks_RW = self._programs.new_masks(shape.rows)
        self._mask_writer.write(matchers, masks_RW)
        return masks_RW

    def _add_to_digest(self, numbers: NDArray[np.int32]) -> None:
        if self.digest is not None:
            self.digest = crc32(np.ascontiguousarray(numbers).data, self.digest)

    def _finish_late(self, sequence: Sequence, now: float) -> SequenceOutput:
        late_s = now - (sequence.request.deadline or now)
        error = DeadlineExceeded(f"the request was still waiting {late_s:.1f} s after its deadline.")
        return self._roster.finish(sequence, FinishReason.ERROR, error=error)
