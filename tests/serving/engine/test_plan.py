"""The planner alone: what it may promise, in any state, and that everyone ends."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from kv.page_keys import PageKeys
from kv.page_table import pages_for
from serving.engine.api import EngineRequest
from serving.engine.pages import Match
from serving.engine.plan import Limits, plan_step
from serving.engine.sequence import NO_SLOT, Sequence
from serving.request import SamplingParams

LIMITS = Limits(page_size=4, tile_tokens=8, max_tiles=3)


def sequence(prompt, max_tokens=8, **state):
    request = EngineRequest("x", tuple(range(prompt)), SamplingParams())
    return Sequence(request, max_tokens=max_tokens, seed=0, keys=PageKeys(4), **state)


@dataclasses.dataclass(frozen=True)
class Pages:
    """A pool of which nothing is shared, except what `cached` says of a prompt length: (pages, idle ones)."""

    num_free: int
    cached: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def match(self, sequence):
        count, num_idle = self.cached.get(sequence.num_prompt, (0, 0))
        return Match(tuple(range(1, count + 1)), num_idle)

    def num_releasable(self, sequence):
        return sequence.num_pages


def decoding(tokens, pages, max_tokens=100):
    """A running sequence whose newest token lies on the device."""
    return sequence(tokens - 1, max_tokens, num_scheduled=tokens - 1, num_pending=1, on_device=True, slot=0,
                    num_pages=pages)  # fmt: skip


def state_of(s):
    return [list(value) if isinstance(value := getattr(s, f.name), list) else value for f in dataclasses.fields(s)]


def names(sequences):
    return [s.num_tokens for s in sequences]


def test_nothing_to_do_is_an_empty_plan():
    assert not plan_step([], [], 4, Pages(100), LIMITS).has_work


def test_decodes_and_a_new_prompt_share_the_step():
    running = [decoding(6, 2), decoding(9, 3)]
    plan = plan_step([sequence(10)], running, 2, Pages(50), LIMITS)
    assert names(plan.decode) == [6, 9]
    assert [(a.sequence.num_prompt, a.num_pages) for a in plan.admit] == [(10, 3)]
    assert [(c.start, c.length, c.is_last) for c in plan.prefill] == [(0, 10, True)]


def test_a_long_prompt_is_cut_at_the_step_budget_and_goes_on_before_others():
    long, short = sequence(30), sequence(5)
    plan = plan_step([long, short], [], 4, Pages(50), LIMITS)
    assert [(c.sequence, c.length, c.is_last) for c in plan.prefill] == [(long, 24, False)]
    long.num_scheduled, long.slot, long.num_pages = 24, 0, 8
    plan = plan_step([short], [long], 3, Pages(42), LIMITS)
    assert [(c.sequence, c.start, c.length) for c in plan.prefill] == [(long, 24, 6), (short, 0, 5)]


def test_a_cached_beginning_is_shared_and_prefill_starts_behind_it():
    pages = Pages(10, {10: (2, 1)})
    plan = plan_step([sequence(10)], [], 4, pages, LIMITS)
    assert [(a.cached, a.num_pages) for a in plan.admit] == [((1, 2), 1)]
    assert [(c.start, c.length, c.is_last) for c in plan.prefill] == [(8, 2, True)]


def test_sharing_an_idle_page_takes_it_from_the_free_ones():
    running = [decoding(6, 2)]  # for whom one page stays free
    assert plan_step([sequence(10)], running, 4, Pages(3, {10: (2, 1)}), LIMITS).admit
    assert not plan_step([sequence(10)], running, 4, Pages(3, {10: (2, 2)}), LIMITS).admit


def test_first_come_first_served_even_if_a_later_one_would_fit():
    plan = plan_step([sequence(40), sequence(2)], [], 4, Pages(5), LIMITS)
    assert not plan.has_work


def test_the_youngest_is_preempted_for_the_oldest_and_nobody_is_admitted_then():
    old, middle, young = decoding(8, 1), decoding(7, 2), decoding(8, 2)
    plan = plan_step([sequence(1)], [old, middle, young], 1, Pages(0), LIMITS)
    assert plan.preempt == (young,)
    assert plan.grow == (old,)
    assert plan.decode == (old, middle)
    assert not plan.admit


def test_a_sequence_that_is_about_to_finish_is_not_preempted():
    """It frees its pages by itself when the step in flight is read."""
    finishing = decoding(9, 3, max_tokens=1)
    plan = plan_step([], [decoding(9, 2), finishing], 1, Pages(0), LIMITS)
    assert finishing.is_exhausted and finishing not in plan.preempt


def test_a_preempted_sequence_waits_until_its_last_token_has_been_read():
    preempted = decoding(5, 2)
    preempted.reset()
    assert not plan_step([preempted], [], 4, Pages(50), LIMITS).has_work
    preempted.token_ids.append(1)
    preempted.num_pending = 0
    assert plan_step([preempted], [], 4, Pages(50), LIMITS).prefill[0].length == 5


@st.composite
def states(draw):
    """Any state that the engine can reach, roughly: running sequences in all phases and a queue."""
    running = []
    for _ in range(draw(st.integers(0, 6))):
        tokens = draw(st.integers(1, 60))
        if draw(st.booleans()):
            pages = pages_for(tokens - 1, 4) or 1
            running.append(decoding(tokens, pages, draw(st.integers(1, 3))))
        else:
            done = draw(st.integers(0, tokens - 1))
            running.append(sequence(tokens, num_scheduled=done, slot=0, num_pages=pages_for(tokens + 1, 4)))
    waiting = [sequence(draw(st.integers(1, 60))) for _ in range(draw(st.integers(0, 6)))]
    return waiting, running, draw(st.integers(0, 4)), draw(st.integers(0, 40))


@given(states())
@settings(max_examples=400)
def test_a_plan_never_promises_what_is_not_there(state):
    waiting, running, free_slots, free_pages = state
    before = [state_of(s) for s in waiting + running]
    plan = plan_step(waiting, running, free_slots, Pages(free_pages), LIMITS)
    assert [state_of(s) for s in waiting + running] == before, "the planner changed something"
    promised = len(plan.grow) + sum(a.num_pages for a in plan.admit)
    assert promised <= free_pages + sum(s.num_pages for s in plan.preempt)
    assert len(plan.admit) <= free_slots
    assert sum(pages_for(c.length, LIMITS.tile_tokens) for c in plan.prefill) <= LIMITS.max_tiles
    working = [*plan.decode, *(c.sequence for c in plan.prefill)]
    assert len(set(map(id, working))) == len(working), "a sequence works twice"
    assert not set(map(id, plan.preempt)) & set(map(id, working)), "a preempted sequence works"
    for s in plan.decode:
        pages = s.num_pages + (s in plan.grow)
        assert pages * LIMITS.page_size >= s.num_tokens, "a decode row without room for its token"
    for chunk in plan.prefill:
        assert chunk.length >= 1 and chunk.start == chunk.sequence.num_scheduled
    assert [a.sequence for a in plan.admit] == waiting[: len(plan.admit)], "someone jumped the queue"


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=12),
    st.integers(16, 40),
    st.sets(st.integers(0, 11)),
)
@settings(max_examples=150, deadline=None)
def test_everyone_ends_and_preemption_never_starves(requests, num_pages, aborted):
    """A model of the engine without a device: apply plans until all is done, with arrivals and aborts on the way."""
    arrivals = sorted(((at, i, sequence(prompt, answer)) for i, (prompt, answer, at) in enumerate(requests)),
                      key=lambda item: item[:2])  # fmt: skip
    waiting, running, free_slots, free_pages, pending = [], [], 4, num_pages, []
    for step in range(3_000):
        while arrivals and arrivals[0][0] <= step:
            waiting.append(arrivals.pop(0)[2])
        plan = plan_step(waiting, running, free_slots, Pages(free_pages), LIMITS)
        for s in plan.preempt:
            running.remove(s)
            free_pages, free_slots = free_pages + s.num_pages, free_slots + 1
            s.reset()
            waiting.insert(0, s)
        for a in plan.admit:
            waiting.remove(a.sequence)
            running.append(a.sequence)
            a.sequence.slot, a.sequence.num_pages = 0, a.num_pages
            free_pages, free_slots = free_pages - a.num_pages, free_slots - 1
        for s in plan.grow:
            s.num_pages, free_pages = s.num_pages + 1, free_pages - 1
        assert free_pages >= 0 and free_slots >= 0
        sampled = [*plan.decode, *(c.sequence for c in plan.prefill if c.is_last)]
        for s in plan.decode:
            s.num_scheduled += 1
        for c in plan.prefill:
            c.sequence.num_scheduled += c.length
        for s in sampled:
            s.num_pending, s.on_device = 1 + s.num_pending, True
        pending, read = sampled, pending
        for s in read:
            s.num_pending -= 1
            s.token_ids.append(0)
            ended = len(s.token_ids) - s.num_prompt >= s.max_tokens or (step in aborted and s is read[0])
            if ended and s in running:
                running.remove(s)
                free_pages, free_slots = free_pages + s.num_pages, free_slots + 1
            elif ended:
                waiting.remove(s)
            if ended:
                s.slot, s.num_pages = NO_SLOT, 0
                pending = [p for p in pending if p is not s]
        if not (arrivals or waiting or running or pending):
            assert (free_pages, free_slots) == (num_pages, 4)
            return
    raise AssertionError("some request never ended")
