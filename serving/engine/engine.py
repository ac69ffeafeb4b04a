"""Engine: plan, dispatch, commit. Owned by one thread; knows token ids, nothing about text.

`step` dispatches the next device call before it reads the tokens of the last one, so the device never waits for the
host. What the host does not know yet (the newest token of each sequence) stays on the device, indexed by slot. A
sequence that turns out to have ended gets one token too many, which is dropped.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import numpy as np

from kv.page_keys import PageKeys
from kv.page_pool import PagePool
from kv.page_table import PageTable
from kv.prefix_cache import PrefixCache
from serving.engine.api import EngineRequest, SequenceOutput, StepStats, TokenLogprobs
from serving.engine.batch import SlotSettings, build_batch, choose_shape
from serving.engine.edits import build_edits
from serving.engine.logprobs import RowLogprobs
from serving.engine.pages import SlotPages
from serving.engine.plan import Limits, StepPlan, plan_step
from serving.engine.sequence import NO_SLOT, Sequence
from serving.engine.slot_state import sequence_packets
from serving.engine.step import Programs
from serving.engine.step_clock import StepClock
from serving.engine.step_ring import StepRecord, StepRing
from serving.errors import EngineFailed, Overloaded, PromptTooLong, ServiceError
from serving.request import SEED_BITS, FinishReason, Load


@dataclass(frozen=True, slots=True)
class InFlight:
    """A dispatched step: which row holds whose token."""

    tokens_R: jax.Array
    sampled: tuple[tuple[int, Sequence], ...]
    filled: tuple[tuple[Sequence, int], ...]
    """Sequences with a page that this step fills, and how many of their tokens are in pages then."""
    logprobs: RowLogprobs | None = None
    """None when no row asked: then they stay on the device."""


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
    ) -> None:
        """`draw_seed(bits)` gives a random seed to a request that names none. `overlap=False` reads every step at once:
        the reference that the overlapped engine must equal."""
        spec = programs.spec
        self.max_seq_len = min(max_seq_len, pool.num_usable * limits.page_size)
        self.vocab_size = spec.config.vocab_size
        self._programs = programs
        self._pool = pool
        self._limits = limits
        self._eos = frozenset(eos_token_ids)
        self._max_waiting = max_waiting
        self._draw_seed = draw_seed
        self._overlap = overlap
        self._table = PageTable(spec.num_slots, spec.pages_per_slot)
        cache = PrefixCache(pool, enabled=prefix_cache)
        self._pages = SlotPages(pool, cache, self._table, limits.page_size)
        self._settings = SlotSettings(spec.num_slots)
        self._free_slots = list(range(spec.num_slots - 1, -1, -1))
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._in_flight: InFlight | None = None
        self._clock = StepClock()
        self.ring = StepRing()
        self._num_steps = self._num_preemptions = self._prompt_tokens = self._generation_tokens = 0
        self._prefill_tokens = self._cache_queries = self._cache_hits = 0

    @property
    def has_work(self) -> bool:
        return bool(self._by_id or self._in_flight)

    @property
    def load(self) -> Load:
        return Load(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            free_slots=len(self._free_slots),
            total_slots=self._programs.spec.num_slots,
            free_pages=self._pool.num_free,
            total_pages=self._pool.num_usable,
            page_size=self._limits.page_size,
        )

    @property
    def stats(self) -> StepStats:
        return StepStats(
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefill_tokens=self._prefill_tokens,
            prefix_cache_queries=self._cache_queries,
            prefix_cache_hits=self._cache_hits,
            step_host_s=self._clock.host_s,
            step_device_wait_s=self._clock.device_wait_s,
        )

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises Overloaded when the queue is full, PromptTooLong when it can never fit."""
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(f"{len(self._waiting)} requests are waiting already, the limit; try again later.")
        room = self.max_seq_len - len(request.token_ids)
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {len(request.token_ids):,} tokens, but prompt and answer may have "
                f"{self.max_seq_len:,} together."
            )
        params = request.sampling
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        sequence = Sequence(
            request,
            max_tokens=min(params.max_tokens or room, room),
            seed=self._draw_seed(SEED_BITS) if params.seed is None else params.seed,
            keys=PageKeys(self._limits.page_size, request.cache_salt),
            stop_ids=stop_ids,
            edits_3E=build_edits(params, stop_ids, len(request.token_ids)),
        )
        self._by_id[request.request_id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> SequenceOutput | None:
        """End a request now; its slot and pages are free for the very next step."""
        sequence = self._by_id.get(request_id)
        return None if sequence is None else self._finish(sequence, FinishReason.ABORT)

    def fail_all(self, error: ServiceError) -> tuple[SequenceOutput, ...]:
        """End every request with an error, after a step has failed."""
        self._in_flight = None
        self._pages.forget_cached()
        return tuple(self._finish(s, FinishReason.ERROR, error=error) for s in list(self._by_id.values()))

    def step(self) -> tuple[SequenceOutput, ...]:
        """Dispatch the next step, then hand out the tokens of the one before."""
        self._clock.start_step()
        plan = plan_step(self._waiting, self._running, len(self._free_slots), self._pages, self._limits)
        self._commit_plan(plan)
        dispatched = self._dispatch(plan) if plan.has_work else None
        if self._overlap:
            dispatched, self._in_flight = self._in_flight, dispatched
        outputs = self._commit_tokens(dispatched) if dispatched else ()
        self.ring.end(*self._clock.end_step())
        return outputs

    def check_integrity(self) -> None:
        """Assert that pages, slots and queues agree with each other."""
        self._pages.check_integrity()
        slots = [s.slot for s in self._running]
        assert sorted([*slots, *self._free_slots]) == list(range(self._programs.spec.num_slots)), "slots do not add up"
        assert set(map(id, self._by_id.values())) == set(map(id, [*self._running, *self._waiting]))
        assert all(s.num_pages == self._table.num_pages(s.slot) for s in self._running)
        assert all(s.slot == NO_SLOT and s.num_pages == 0 for s in self._waiting)

    def _commit_plan(self, plan: StepPlan) -> None:
        for sequence in plan.preempt:
            self._leave_slot(sequence)
            sequence.reset()
            self._waiting.appendleft(sequence)
            self._num_preemptions += 1
        for admission in plan.admit:
            sequence = admission.sequence
            assert self._waiting.popleft() is sequence
            sequence.slot = self._free_slots.pop()
            self._settings.set(sequence.slot, sequence)
            for packet in sequence_packets(sequence):
                self._programs.write_slot(packet)
            self._running.append(sequence)
            self._share(sequence, admission.cached)
        for admission in plan.admit:
            self._pages.add(admission.sequence, admission.num_pages)
        for sequence in plan.grow:
            self._pages.add(sequence, 1)

    def _share(self, sequence: Sequence, cached: tuple[int, ...]) -> None:
        self._pages.share(sequence, cached)
        if sequence.num_cached is None:  # not admitted before
            sequence.num_cached = sequence.num_scheduled
            self._cache_queries += sequence.num_prompt if self._pages.enabled else 0
            self._cache_hits += sequence.num_cached

    def _dispatch(self, plan: StepPlan) -> InFlight:
        shape = choose_shape(plan, self._programs.shapes, self._limits.tile_tokens)
        self.ring.add(self._record(plan, str(shape)))
        packed = build_batch(plan, self._programs.spec.layout(shape), self._table, self._settings)
        tokens_R, logprobs = self._programs.run(shape, packed)
        self._num_steps += 1
        sampled = list(enumerate(plan.decode))
        for sequence in plan.decode:
            sequence.num_scheduled += 1
        for row, chunk in enumerate(plan.prefill, start=len(plan.decode)):
            if chunk.is_last:
                sampled.append((row, chunk.sequence))
            chunk.sequence.num_scheduled += chunk.length
        for _, sequence in sampled:
            sequence.num_pending += 1
            sequence.on_device = True
        self._prefill_tokens += sum(chunk.length for chunk in plan.prefill)
        filled = [(s, s.num_scheduled) for s in plan.decode if s.num_scheduled % self._limits.page_size == 0]
        filled += [(chunk.sequence, chunk.sequence.num_scheduled) for chunk in plan.prefill]
        wanted = logprobs.start_copy() if self._settings.any_logprobs else None
        return InFlight(tokens_R, tuple(sampled), tuple(filled), wanted)

    def _record(self, plan: StepPlan, shape: str) -> StepRecord:
        return StepRecord(
            number=self._num_steps,
            at_unix_s=time.time(),
            shape=shape,
            num_decode=len(plan.decode),
            num_prefill=len(plan.prefill),
            prefill_tokens=sum(chunk.length for chunk in plan.prefill),
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            free_pages=self._pool.num_free,
            admitted=tuple(admission.sequence.request.request_id for admission in plan.admit),
            preempted=tuple(sequence.request.request_id for sequence in plan.preempt),
        )

    def _commit_tokens(self, step: InFlight) -> tuple[SequenceOutput, ...]:
        tokens = self._clock.wait_for(lambda: np.asarray(step.tokens_R)).tolist()
        for sequence, num_written in step.filled:
            self._pages.publish(sequence, num_written)
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        if step.logprobs is not None:
            logprobs = step.logprobs.read({row: s.request.sampling.logprobs for row, s in step.sampled})
        return tuple(
            self._append(sequence, tokens[row], logprobs.get(row, ()))
            for row, sequence in step.sampled
            if sequence.finish_reason is None
        )

    def _append(self, sequence: Sequence, token: int, logprobs: tuple[TokenLogprobs, ...]) -> SequenceOutput:
        if len(sequence.token_ids) == sequence.num_prompt:
            self._prompt_tokens += sequence.num_prompt
        sequence.num_pending -= 1
        sequence.token_ids.append(token)
        self._generation_tokens += 1
        if token in sequence.stop_ids:
            return self._finish(sequence, FinishReason.STOP, (token,), logprobs=logprobs)
        if len(sequence.token_ids) - sequence.num_prompt >= sequence.max_tokens:
            return self._finish(sequence, FinishReason.LENGTH, (token,), logprobs=logprobs)
        cached = sequence.num_cached or 0
        return SequenceOutput(sequence.request.request_id, (token,), cached_tokens=cached, logprobs=logprobs)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        tokens: tuple[int, ...] = (),
        error: ServiceError | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> SequenceOutput:
        """The one place where a request ends: slot and pages are freed here."""
        sequence.finish_reason = reason
        del self._by_id[sequence.request.request_id]
        if sequence.slot == NO_SLOT:
            self._waiting.remove(sequence)
        else:
            self._leave_slot(sequence)
        return SequenceOutput(sequence.request.request_id, tokens, reason, error, sequence.num_cached or 0, logprobs)

    def _leave_slot(self, sequence: Sequence) -> None:
        """Free slot and pages. A step in flight may still write there: it runs before any step that reuses them."""
        self._running.remove(sequence)
        self._pages.release(sequence)
        self._settings.clear(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.slot = NO_SLOT


def step_failed(error: Exception) -> EngineFailed:
    """What the requests of a failed step are told."""
    return EngineFailed(f"the device step failed ({type(error).__name__}: {error}); the request may be sent again.")
