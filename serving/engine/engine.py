"""Engine: plan, dispatch, commit. Owned by one thread; knows token ids, nothing about text.

`step` dispatches the next device call before it reads the tokens of the last one, so the device never waits for the
host. What the host does not know yet (the newest token of each sequence) stays on the device, indexed by slot. A
sequence that turns out to have ended may get tokens too many, which are dropped.
"""

import logging
from collections.abc import Callable, Iterable
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from kv.page_pool import PagePool
from kv.page_table import PageTable
from kv.prefix_cache import PrefixCache
from serving.engine.api import EngineRequest, Matcher, SequenceOutput, StepStats, TokenLogprobs
from serving.engine.batch import NOT_FINITE, SlotSettings, StepShape, build_batch, choose_shape
from serving.engine.counts import EngineCounts
from serving.engine.grammar import MaskWriter
from serving.engine.in_flight import InFlight
from serving.engine.intake import Intake
from serving.engine.news import append_tokens
from serving.engine.pages import SlotPages
from serving.engine.plan import Limits, StepPlan
from serving.engine.planner import plan_step
from serving.engine.sequence import INTERACTIVE, NO_SLOT, Sequence
from serving.engine.siblings import Siblings
from serving.engine.slot_state import sequence_packets
from serving.engine.slots import SlotTable
from serving.engine.speculation import Speculation
from serving.engine.step import Programs
from serving.engine.step_clock import StepClock
from serving.engine.step_ring import StepRecord, StepRing
from serving.engine.trip_times import TripTimes
from serving.engine.trips import ENDED
from serving.engine.waiting import WaitingQueue
from serving.errors import DeadlineExceeded, EngineFailed, InvalidRequest, Overloaded, ServiceError
from serving.request import FinishReason, Load

logger = logging.getLogger(__name__)


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
    ) -> None:
        """`draw_seed(bits)` gives a random seed to a request that names none. `overlap=False` reads every step at once:
        the reference that the overlapped engine must equal. `trip_s` says how long one token for all takes, and
        `verify_s` a call that checks guesses, instead of a measurement."""
        spec = programs.spec
        assert limits.max_trips <= spec.max_trips, "the programs have fewer trips than the planner may ask for"
        self.max_seq_len = min(max_seq_len, pool.num_usable * limits.page_size)
        self._intake = Intake(eos_token_ids, self.max_seq_len, limits.page_size, draw_seed)
        self.vocab_size = spec.config.vocab_size
        self._programs = programs
        self._limits = limits
        self._max_waiting = max_waiting
        self._overlap = overlap
        self._prefix_cache = prefix_cache
        self._take_pool(pool)
        self._clock = StepClock()
        self._trip_times, self._verify_times = TripTimes(trip_s), TripTimes(verify_s)
        self._speculation = Speculation(limits.max_drafts) if limits.max_drafts else None
        self._mask_writer = MaskWriter()
        self.ring = StepRing()
        self._counts = EngineCounts()
        self._num_plans = 0

    def _take_pool(self, pool: PagePool) -> None:
        """Nobody waits, runs, or is in flight; no page holds anything."""
        spec = self._programs.spec
        self._pool = pool
        self._table = PageTable(spec.num_slots, spec.pages_per_slot)
        cache = PrefixCache(pool, enabled=self._prefix_cache)
        self._pages = SlotPages(pool, cache, self._table, self._limits.page_size)
        self._settings = SlotSettings(spec.num_slots)
        self._slots = SlotTable(spec.num_slots)
        self._waiting = WaitingQueue()
        self._siblings = Siblings()
        self._by_id: dict[str, Sequence] = {}
        self._in_flight: InFlight | None = None
        self._num_promoted = 0
        self._unsaid: dict[str, SequenceOutput] = {}  # ends of this step, lost if it raises

    @property
    def has_work(self) -> bool:
        return bool(self._by_id or self._in_flight)

    @property
    def load(self) -> Load:
        return Load(
            num_running=self._slots.num_running,
            num_waiting=len(self._waiting) + len(self._siblings),
            free_slots=self._slots.num_free,
            total_slots=self._programs.spec.num_slots,
            free_pages=self._pool.num_free,
            total_pages=self._pool.num_usable,
            page_size=self._limits.page_size,
        )

    @property
    def stats(self) -> StepStats:
        return self._counts.stats(self._clock)

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises Overloaded when the queue is full, PromptTooLong when it can never fit."""
        num_waiting = len(self._waiting) + len(self._siblings)
        if num_waiting >= self._max_waiting:
            raise Overloaded(f"{num_waiting} requests are waiting already, the limit; try again later.")
        sequence = self._intake.make(request, self._num_plans)
        self._by_id[request.request_id] = sequence
        first = self._by_id.get(request.after)
        if first is not None and (self._pages.will_share(first) or first.wants_prompt_logprobs):
            self._siblings.hold(sequence)
        else:
            self._waiting.add(sequence)

    def abort(self, request_id: str) -> SequenceOutput | None:
        """End a request now; its slot and pages are free for the very next step."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return None
        ended = self._finish(sequence, FinishReason.ABORT)
        self._unsaid.clear()
        return ended

    def recover(self, error: ServiceError) -> tuple[SequenceOutput, ...]:
        """Start anew after a step that raised, wherever it stood: empty arrays on the device, an empty pool. Requests
        that had begun end with `error`; those that never had a slot wait on.

        Raises what the device raises when it cannot even hold empty arrays; then nothing has ended yet.
        """
        self._counts.num_failed_steps += 1
        self._programs.reset()
        waiting = [s for s in self._by_id.values() if s.slot == NO_SLOT and not s.was_admitted]
        outputs = self._drop(self._by_id.keys() - {s.request_id for s in waiting}, error)
        self._take_pool(PagePool(self._pool.num_usable + 1))
        for sequence in waiting:
            self._by_id[sequence.request_id] = sequence
            self._waiting.add(sequence)
        self._num_promoted = sum(s.is_promoted for s in waiting)
        return outputs

    def fail_all(self, error: ServiceError) -> tuple[SequenceOutput, ...]:
        """End every request with an error, in whatever state a step has left the engine."""
        outputs = self._drop(self._by_id.keys(), error)
        self._take_pool(PagePool(self._pool.num_usable + 1))
        return outputs

    def _drop(self, names: Iterable[str], error: ServiceError) -> tuple[SequenceOutput, ...]:
        """The ends that the last step did not come to tell, and those of `names`, whose slots and pages are past care:
        a new pool follows."""
        failed = [SequenceOutput(name, (), FinishReason.ERROR, error, self._by_id[name].num_cached) for name in names]
        return (*self._unsaid.values(), *failed)

    def step(self, now: float = 0.0) -> tuple[SequenceOutput, ...]:
        """Dispatch the next step, then hand out the tokens of the one before. Deadlines before `now`, in monotonic
        seconds, have passed."""
        self._clock.start_step()
        outputs = [self._finish_late(sequence, now) for sequence in self._waiting.overdue(now)]
        plan = self._plan()
        self._commit_plan(plan)
        dispatched = self._dispatch(plan) if plan.has_work else None
        if self._overlap:
            dispatched, self._in_flight = self._in_flight, dispatched
        if dispatched is not None:
            outputs += self._commit_tokens(dispatched)
        self.ring.end(*self._clock.end_step())
        self._unsaid.clear()
        return tuple(outputs)

    def check_integrity(self) -> None:
        """Assert that pages, slots and queues agree with each other."""
        self._pages.check_integrity()
        self._slots.check_integrity(self._limits.max_trips)
        self._waiting.check_integrity(self._limits.max_trips)
        waiting = [*self._waiting.ranked, *self._siblings.all]
        known = [s for s in [*self._slots.sequences, *waiting] if s is not None]
        assert set(map(id, self._by_id.values())) == set(map(id, known))
        assert sum(s.is_promoted for s in known) == self._num_promoted
        occupied_B = self._slots.max_len_B > 0
        assert (occupied_B == (self._table.num_pages_B > 0)).all(), "pages without a sequence, or the other way round"

    def _plan(self) -> StepPlan:
        self._num_plans += 1
        trip_s = self._trip_times.estimate(self._slots.num_running)
        drafts_BD = self._draft(trip_s)
        return plan_step(
            self._waiting.ranked,
            self._slots,
            self._pages,
            self._limits,
            self._num_plans,
            self._num_promoted,
            trip_s,
            drafts_BD,
        )

    def _draft(self, trip_s: float) -> NDArray[np.int32] | None:
        """Guesses for the next call; None for a plain one, as when somebody waits."""
        if self._speculation is None or len(self._waiting) or (self._slots.unfinished_B & ~self._slots.decodes_B).any():
            return None
        return self._speculation.draft(self._slots, trip_s, self._verify_times.estimate(self._slots.num_running))

    def _commit_plan(self, plan: StepPlan) -> None:
        for sequence in plan.promote:
            self._promote(sequence)
        for sequence in plan.preempt:
            self._preempt(sequence)
        for admission in plan.admit:
            self._admit(admission.sequence, admission.cached)
        for admission in plan.admit:
            self._pages.add(admission.sequence, admission.num_pages)
        self._pages.grow(plan.grow)

    def _promote(self, sequence: Sequence) -> None:
        self._num_promoted += 1
        if sequence.slot == NO_SLOT:
            self._waiting.remove(sequence)
            sequence.band = INTERACTIVE
            self._waiting.add(sequence)
        else:
            sequence.band = INTERACTIVE
            self._slots.batch_B[sequence.slot] = False

    def _preempt(self, sequence: Sequence) -> None:
        """What lies in its pages is computed again, except what the prefix cache still has then."""
        self._counts.num_preemptions += 1
        if self._slots.decodes_B[sequence.slot]:
            sequence.waiting_since = self._num_plans
        sequence.num_pending = int(self._slots.num_tokens_B[sequence.slot]) - len(sequence.token_ids)
        self._leave_slot(sequence)
        self._waiting.add(sequence)

    def _admit(self, sequence: Sequence, cached: tuple[int, ...]) -> None:
        self._waiting.remove(sequence)
        self._slots.enter(sequence)
        self._settings.set(sequence.slot, sequence)
        for packet in sequence_packets(sequence):
            self._programs.write_slot(packet)
        self._pages.share(sequence, cached)
        if not sequence.was_admitted:
            sequence.was_admitted, sequence.num_cached = True, sequence.num_scheduled
            if self._pages.enabled:
                self._counts.count_lookup(sequence, sequence.num_cached)

    def _dispatch(self, plan: StepPlan) -> InFlight:
        shape = choose_shape(plan, self._programs.shapes, self._limits.tile_tokens)
        self.ring.add(StepRecord.of(plan, str(shape), self._counts.num_steps, self.load))
        packed = build_batch(plan, self._programs.spec.layout(shape), self._table, self._slots, self._settings)
        results = self._programs.run(shape, packed, self._write_masks(plan, shape))
        step = InFlight.of(plan, self._slots, *results, self._clock.now())
        self._counts.count_plan(plan)
        self._slots.num_tokens_B[plan.decode] += self._slots.num_due(plan.decode, plan.num_trips)
        self._slots.unread_B[step.slot_r] = self._slots.grammar_B[step.slot_r]
        if step.num_drafts_r is not None:  # how many tokens a row has then, the device alone knows
            self._slots.unread_B[step.slot_r[step.num_drafts_r > 0]] = True
        for chunk in plan.prefill:
            chunk.sequence.num_scheduled += chunk.length
            if chunk.is_last:
                self._slots.num_tokens_B[chunk.sequence.slot] += 1
                self._slots.decodes_B[chunk.sequence.slot] = True
        return step

    def _write_masks(self, plan: StepPlan, shape: StepShape) -> NDArray[np.int32] | None:
        """What grammars allow in a step's rows, found while the device works on the step before; None without any."""
        if not self._slots.grammar_B.any():  # the usual case
            return None
        rows = [*self._slots.at(plan.decode), *(chunk.sequence if chunk.is_last else None for chunk in plan.prefill)]
        matchers = [(s.request.matcher, row) for row, s in enumerate(rows) if s and s.request.matcher]
        if not matchers:
            return None
        masks_RW = self._programs.new_masks(shape.rows)
        self._mask_writer.write(matchers, masks_RW)
        return masks_RW

    def _commit_tokens(self, step: InFlight) -> list[SequenceOutput]:
        tokens_RI = self._clock.wait_for(step.read_tokens)
        self._note_time(step, tokens_RI)
        outputs = self._commit_chunks(step, tokens_RI)
        tokens_rI = tokens_RI[step.row_r]
        if step.num_drafts_r is not None:
            self._learn(step.num_drafts_r, step.sequences, tokens_rI)
        odd_r, logprobs = step.is_odd(tokens_rI, self._slots), step.read_logprobs()
        plain = list(compress(step.sequences, (~odd_r).tolist()))
        outputs += append_tokens(plain, tokens_rI[~odd_r].T.tolist())
        odd = zip(compress(step.sequences, odd_r.tolist()), tokens_rI[odd_r].tolist(), strict=True)
        # Who has ended while this step was in flight has tokens too many.
        ended = [
            self._commit_odd(sequence, tokens, logprobs.get(sequence.request_id, ()))
            for sequence, tokens in odd
            if sequence.finish_reason is None
        ]
        self._counts.generation_tokens += len(plain) * step.num_trips + sum(len(output.token_ids) for output in ended)
        if self._speculation is not None:
            self._let_go_on(step)
        return outputs + ended

    def _learn(
        self, num_drafts_r: NDArray[np.int64], sequences: tuple[Sequence, ...], tokens_rI: NDArray[np.int32]
    ) -> None:
        num_given_r = np.count_nonzero(tokens_rI >= 0, axis=1)
        for row in np.flatnonzero((num_drafts_r > 0) & (num_given_r > 0)).tolist():
            num_drafted, num_accepted = int(num_drafts_r[row]), int(num_given_r[row]) - 1
            sequences[row].guesses.learn(num_drafted, num_accepted)
            self._counts.count_drafts(num_drafted, num_accepted)

    def _let_go_on(self, step: InFlight) -> None:
        """Rows that were held back until this step was read, from where they really are."""
        if step.num_drafts_r is not None:
            for sequence in compress(step.sequences, (step.num_drafts_r > 0).tolist()):
                if sequence.slot != NO_SLOT:
                    self._slots.num_tokens_B[sequence.slot] = len(sequence.token_ids)
        mine_r = self._slots.owner_B[step.slot_r] == step.owner_r
        self._slots.unread_B[step.slot_r[mine_r & self._slots.speculates_B[step.slot_r]]] = False

    def _note_time(self, step: InFlight, tokens_RI: NDArray[np.int32]) -> None:
        call_s = self._clock.end_call(step.dispatched_s)
        if not step.prefilled:
            num_trips = int(np.count_nonzero(tokens_RI.max(axis=0) != ENDED))
            if step.num_drafts_r is None:
                self._trip_times.note(len(step.row_r), call_s, num_trips)
            else:  # nothing was dispatched meanwhile, so the host's time comes on top
                self._verify_times.note(len(step.row_r), call_s + self._clock.last_host_s, min(num_trips, 1))

    def _commit_chunks(self, step: InFlight, tokens_RI: NDArray[np.int32]) -> list[SequenceOutput]:
        """Publish what prefill has written. Returns what it tells of prompts, and the ends of those who met NaN."""
        outputs = []
        told = {} if step.prompts is None else step.prompts.read()
        for row, sequence, num_written in step.prefilled:
            if tokens_RI[row, 0] != NOT_FINITE:
                self._pages.publish(sequence, num_written)
                if (news := told.get(sequence.request_id)) and sequence.finish_reason is None:
                    sequence.num_prompt_told += len(news)
                    outputs.append(SequenceOutput(sequence.request_id, prompt_logprobs=news))
                if num_written >= sequence.num_prompt:
                    self._release_siblings(sequence)
            elif sequence.finish_reason is None:
                outputs.append(self._finish_broken(sequence))
        return outputs

    def _commit_odd(self, sequence: Sequence, tokens: list[int], logprobs: tuple[TokenLogprobs, ...]) -> SequenceOutput:
        taken, reason = sequence.take(token for token in tokens if token >= 0)
        if reason is None and NOT_FINITE in tokens:
            return self._finish_broken(sequence, taken)
        sequence.num_pending = 0  # read now, if it was preempted
        matcher = sequence.request.matcher
        if matcher is not None:
            if not self._follow(sequence, matcher, *taken):
                error = InvalidRequest(f"the answer cannot go on as its grammar wants: {matcher.error}.")
                return self._finish(sequence, FinishReason.ERROR, error=error)
            reason = FinishReason.STOP if matcher.is_stopped else reason
        if reason is not None:
            return self._finish(sequence, reason, taken, logprobs=logprobs)
        return SequenceOutput(sequence.request_id, taken, cached_tokens=sequence.num_cached, logprobs=logprobs)

    def _follow(self, sequence: Sequence, matcher: Matcher, token: int) -> bool:
        """Whether the grammar goes on with this token; then the row can be dispatched again."""
        if sequence.slot != NO_SLOT:
            self._slots.unread_B[sequence.slot] = False
        return matcher.accept(token)

    def _finish_broken(self, sequence: Sequence, tokens: tuple[int, ...] = ()) -> SequenceOutput:
        """Only its own tokens led there, since the pages that others read are finite."""
        error = EngineFailed(
            f"the model gave no finite logits for this request, which has {len(sequence.token_ids):,} tokens so far; "
            "its weights are damaged, or too small a number type overflows."
        )
        logger.error("request %s: %s", sequence.request_id, error)
        return self._finish(sequence, FinishReason.ERROR, tokens, error)

    def _finish_late(self, sequence: Sequence, now: float) -> SequenceOutput:
        late_s = now - (sequence.request.deadline or now)
        error = DeadlineExceeded(f"the request was still waiting {late_s:.1f} s after its deadline.")
        return self._finish(sequence, FinishReason.ERROR, error=error)

    def _finish(
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
        self._num_promoted -= sequence.is_promoted
        self._release_siblings(sequence)
        if sequence.slot != NO_SLOT:
            self._leave_slot(sequence)
        elif not self._siblings.remove(sequence):
            self._waiting.remove(sequence)
        guesses = sequence.guesses.num_drafted, sequence.guesses.num_accepted
        ended = SequenceOutput(sequence.request_id, tokens, reason, error, sequence.num_cached, logprobs, (), *guesses)
        self._unsaid[sequence.request_id] = ended
        return ended

    def _release_siblings(self, first: Sequence) -> None:
        for sequence in self._siblings.let_go(first):
            self._waiting.add(sequence)

    def _leave_slot(self, sequence: Sequence) -> None:
        """Free slot and pages. A step in flight may still write there: it runs before any step that reuses them."""
        has_answer = self._slots.decodes_B[sequence.slot] and len(sequence.token_ids) > sequence.num_scheduled
        if has_answer:  # all but the newest token that was read went through a step that was read
            self._pages.publish(sequence, len(sequence.token_ids) - 1)
        self._pages.release(sequence)
        self._slots.leave(sequence)
