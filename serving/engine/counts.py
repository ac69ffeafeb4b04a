"""EngineCounts: what one engine has counted since it started. Written by its thread; read as `StepStats`."""

from bisect import bisect_left
from dataclasses import dataclass, field

from serving.engine.api import STEP_TOKENS, StepStats
from serving.engine.plan import StepPlan
from serving.engine.sequence import Sequence
from serving.engine.step_clock import StepClock


@dataclass(slots=True)
class EngineCounts:
    num_steps: int = 0
    num_failed_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefill_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    host_cache_queries: int = 0
    host_cache_hits: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    sum_step_tokens: int = 0

    def count_plan(self, plan: StepPlan) -> None:
        """A plan that is being dispatched."""
        self.num_steps += 1
        num_tokens = len(plan.decode) * plan.num_trips + sum(chunk.length for chunk in plan.prefill)
        self.step_tokens[bisect_left(STEP_TOKENS, num_tokens)] += 1
        self.sum_step_tokens += num_tokens
        for chunk in plan.prefill:
            self.prefill_tokens += chunk.length
            if chunk.is_last and len(chunk.sequence.token_ids) == chunk.sequence.num_prompt:  # not preempted before
                self.prompt_tokens += chunk.sequence.num_prompt

    def count_drafts(self, num_drafted: int, num_accepted: int) -> None:
        """One sequence's guesses that a call has checked."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.accepted_at += [0] * (num_drafted - len(self.accepted_at))
        for place in range(num_accepted):
            self.accepted_at[place] += 1

    def count_lookup(self, sequence: Sequence, num_cached: int) -> None:
        """A prompt that was looked up in the prefix cache."""
        self.prefix_cache_queries += sequence.num_prompt
        self.prefix_cache_hits += num_cached

    def count_host_lookup(self, num_looked_up: int, num_found: int) -> None:
        """Tokens of such a prompt, which were not found on the device."""
        self.host_cache_queries += num_looked_up
        self.host_cache_hits += num_found

    def stats(self, clock: StepClock, num_host_pages: int = 0) -> StepStats:
        return StepStats(
            num_steps=self.num_steps,
            num_failed_steps=self.num_failed_steps,
            num_preemptions=self.num_preemptions,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            prefill_tokens=self.prefill_tokens,
            prefix_cache_queries=self.prefix_cache_queries,
            prefix_cache_hits=self.prefix_cache_hits,
            host_cache_queries=self.host_cache_queries,
            host_cache_hits=self.host_cache_hits,
            num_host_pages=num_host_pages,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=sum(self.accepted_at),
            accepted_at=tuple(self.accepted_at),
            step_tokens=tuple(self.step_tokens),
            sum_step_tokens=self.sum_step_tokens,
            step_host_s=clock.host_s,
            step_device_wait_s=clock.device_wait_s,
        )
