"""The planner alone: what it may promise, in any state, and who is served first."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.page_keys import PageKeys
from kv.page_table import pages_for
from kv.prefix_cache import AWAY, Beginning
from serving.engine.api import EngineRequest
from serving.engine.pages import Match
from serving.engine.plan import Chunk, Limits
from serving.engine.planner import plan_step
from serving.engine.sequence import BATCH, INTERACTIVE, Sequence, rank
from serving.engine.slots import SlotTable
from serving.request import Priority, SamplingParams

LIMITS = Limits(page_size=4, tile_tokens=8, max_tiles=3, growth_tokens=4, patience=10)
LOOPED = dataclasses.replace(LIMITS, max_trips=8, max_call_s=0.02)


class World:
    """Slots, queue and pages of which nothing is shared, except what `cached` says: prompt -> (pages, idle ones)."""

    def __init__(self, num_free=50, num_slots=4, cached=None):
        self.slots = SlotTable(num_slots)
        self.num_pages_B = np.zeros(num_slots, np.int32)
        self.num_free = num_free
        self.num_sets = 1
        self.num_copies_back = 0
        self.lacking = {}
        """Pages that prefilling sequences have yet to get for their next chunk, by slot."""
        self.cached = cached or {}
        self.waiting = []
        self._arrivals = 0

    def sequence(self, prompt, max_tokens=8, priority=Priority.INTERACTIVE):
        self._arrivals += 1
        request = EngineRequest("x", tuple(range(prompt)), SamplingParams(), priority=priority)
        return Sequence(request, max_tokens=max_tokens, seed=0, keys=PageKeys(4), arrival=self._arrivals)

    def wait(self, *args, **kwargs):
        self.waiting.append(self.sequence(*args, **kwargs))
        self.waiting.sort(key=rank)
        return max(self.waiting, key=lambda s: s.arrival)

    def prefill(self, tokens, done, pages, **kwargs):
        """A running sequence with `done` of its tokens computed."""
        sequence = self.sequence(tokens, **kwargs)
        self.slots.enter(sequence)
        sequence.num_scheduled = done
        self.num_pages_B[sequence.slot] = pages
        return sequence

    def decode(self, tokens, pages, max_tokens=100, **kwargs):
        """A running sequence whose newest token lies on the device."""
        sequence = self.prefill(tokens - 1, tokens - 1, pages, max_tokens=max_tokens, **kwargs)
        self.slots.num_tokens_B[sequence.slot] = tokens
        self.slots.decodes_B[sequence.slot] = True
        return sequence

    def match(self, sequence):
        count, num_idle = self.cached.get(sequence.num_prompt, (0, 0))
        return Match(Beginning(count, (tuple(range(1, count + 1)),)), num_idle)

    def num_new(self, num_columns, match):
        return self.num_sets * (num_columns - match.num_columns)

    def num_to_fill(self, sequence, num_tokens):
        assert num_tokens == LIMITS.chunk_tokens and not self.slots.decodes_B[sequence.slot]
        return self.lacking.get(sequence.slot, 0)

    def num_releasable(self, sequence):
        return self.num_sets * int(self.num_pages_B[sequence.slot])

    def plan(self, step=0, num_promoted=0, limits=LIMITS, trip_s=0.001, drafts=None, catch_up=(), costs=None):
        return plan_step(self.waiting, self.slots, self, limits, step, num_promoted, trip_s, drafts, catch_up, costs)


def chunks(plan):
    return [(c.sequence, c.start, c.length) for c in plan.prefill]


def admitted(plan):
    return [a.sequence for a in plan.admit]


def test_nothing_to_do_is_an_empty_plan():
    assert not World().plan().has_work


def test_decodes_and_a_new_prompt_share_the_step():
    world = World()
    old, older = world.decode(6, 2), world.decode(9, 3)
    new = world.wait(10)
    plan = world.plan()
    assert plan.decode.tolist() == [old.slot, older.slot]
    assert [(a.sequence, a.num_columns) for a in plan.admit] == [(new, 3)]
    assert chunks(plan) == [(new, 0, 10)] and plan.prefill[0].is_last


def test_a_long_prompt_is_cut_at_the_step_budget_and_goes_on_before_others():
    world = World()
    long, short = world.wait(30), world.wait(5)
    assert chunks(world.plan()) == [(long, 0, 24)]
    world = World()
    long, short = world.prefill(30, 24, 8), world.wait(5)
    assert chunks(world.plan()) == [(long, 24, 6), (short, 0, 5)]


def test_a_cached_beginning_is_shared_and_prefill_starts_behind_it():
    world = World(10, cached={10: (2, 1)})
    world.wait(10)
    plan = world.plan()
    assert [(a.match.beginning.pages, a.num_columns) for a in plan.admit] == [(((1, 2),), 3)]
    assert [(c.start, c.length, c.is_last) for c in plan.prefill] == [(8, 2, True)]


@pytest.mark.parametrize(("num_idle", "fits"), [(1, True), (2, False)])
def test_sharing_an_idle_page_takes_it_from_the_free_ones(num_idle, fits):
    world = World(3, cached={10: (2, num_idle)})
    world.decode(6, 2)  # for whose growth one page stays free
    world.wait(10)
    assert bool(world.plan().admit) == fits


@pytest.mark.parametrize(("room", "num_admitted"), [(1, 0), (3, 1), (4, 3)])
def test_no_more_pages_come_back_from_the_host_than_there_is_room_for_and_nobody_passes(room, num_admitted):
    world = World()
    away = [world.wait(10), world.wait(10)]
    world.match = lambda sequence: Match(Beginning(2, ((AWAY, AWAY),))) if sequence in away else Match()
    world.num_copies_back = room
    asked = [*away, world.wait(5)]
    assert admitted(world.plan()) == asked[:num_admitted]


def test_first_come_first_served_even_if_a_later_one_would_fit():
    world = World(5)
    world.wait(40)
    world.wait(2)
    assert not world.plan().has_work


def test_the_youngest_is_preempted_for_the_oldest_and_nobody_is_admitted_then():
    world = World(0)
    old, middle, young = world.decode(8, 1), world.decode(7, 2), world.decode(8, 2)
    world.wait(1)
    plan = world.plan()
    assert plan.preempt == (young,)
    assert plan.grow.tolist() == [old.slot]
    assert plan.decode.tolist() == [old.slot, middle.slot]
    assert not plan.admit


def test_a_sequence_that_is_about_to_finish_is_not_preempted():
    """It frees its pages by itself when the step in flight is read."""
    world = World(0)
    growing = world.decode(9, 2)
    world.decode(9, 3, max_tokens=1)
    assert world.plan().preempt == (growing,)


def test_a_preempted_sequence_waits_until_its_last_token_has_been_read():
    world = World()
    preempted = world.wait(5)
    preempted.num_pending = 1
    assert not world.plan().has_work
    preempted.num_pending = 0
    assert chunks(world.plan()) == [(preempted, 0, 5)]


def test_interactive_goes_before_batch_that_came_earlier():
    world = World()
    batch, chat = world.wait(20, priority=Priority.BATCH), world.wait(10)
    assert chunks(world.plan()) == [(chat, 0, 10), (batch, 0, 8)]
    world = World()
    batch, chat = world.prefill(60, 8, 16, priority=Priority.BATCH), world.wait(20)
    assert chunks(world.plan()) == [(chat, 0, 20)], "batch gets the tiles that are left"


def test_batch_makes_way_when_a_slot_is_wanted():
    world = World(num_slots=2)
    older, younger = (world.decode(6, 2, priority=Priority.BATCH) for _ in range(2))
    chat = world.wait(5)
    plan = world.plan()
    assert (plan.preempt, admitted(plan)) == ((younger,), [chat])
    assert plan.decode.tolist() == [older.slot]
    world.waiting[:] = []
    world.wait(5, priority=Priority.BATCH)
    assert not world.plan().preempt, "batch takes nothing from batch"


def test_batch_makes_way_when_pages_are_wanted_but_never_in_vain():
    world = World(1)
    batch, chat = world.decode(8, 2, priority=Priority.BATCH), world.wait(11)
    plan = world.plan()
    assert (plan.preempt, admitted(plan)) == ((batch,), [chat])
    world.waiting[:] = []
    world.wait(15)
    assert not world.plan().preempt, "three pages do not help who needs four"


def test_what_preemption_leaves_over_goes_to_no_batch_request_of_a_worse_rank():
    world = World(num_free=0, num_slots=3)
    batch = world.decode(30, 8, priority=Priority.BATCH)
    chat, _ = world.wait(5), world.wait(5, priority=Priority.BATCH)
    plan = world.plan()
    assert (plan.preempt, admitted(plan)) == ((batch,), [chat])


def test_an_interactive_one_that_does_not_fit_lets_no_batch_pass():
    world = World(4)
    world.wait(40)
    world.wait(2, priority=Priority.BATCH)
    assert not world.plan().admit


def test_room_is_left_for_the_growth_of_the_same_and_better_bands_only():
    world = World(3)
    world.decode(8, 2, priority=Priority.BATCH)
    world.decode(8, 2, priority=Priority.BATCH)
    world.wait(10, priority=Priority.BATCH)
    assert not world.plan().admit
    world.waiting[:] = []
    world.wait(10)
    assert world.plan().admit


@pytest.mark.parametrize("running", [False, True])
def test_a_batch_sequence_that_waited_long_is_promoted(running):
    world = World(num_free=1)
    first = world.prefill(9, 4, 3, priority=Priority.BATCH) if running else world.wait(9, priority=Priority.BATCH)
    world.wait(9, priority=Priority.BATCH)
    assert not world.plan(step=9).promote
    assert world.plan(step=10).promote == (first,)
    assert not world.plan(step=10, num_promoted=1).promote, "the floor is one slot here"


@pytest.mark.parametrize(
    ("trip_s", "num_trips"), [(0.0, 8), (0.001, 8), (0.004, 5), (0.015, 1), (0.5, 1), (float("inf"), 1)]
)
def test_a_call_of_several_trips_is_short(trip_s, num_trips):
    world = World()
    world.decode(6, 3)
    assert world.plan(limits=LOOPED, trip_s=trip_s).num_trips == num_trips


def test_several_trips_take_their_pages_and_no_more_trips_than_there_are_pages_for():
    world = World(num_free=5)
    one, other = world.decode(8, 2), world.decode(5, 2, max_tokens=3)
    plan = world.plan(limits=LOOPED)
    assert (plan.num_trips, plan.grow.tolist()) == (8, [one.slot, one.slot]), "the other needs only its last tokens"
    world.num_free = 1
    plan = world.plan(limits=LOOPED)
    assert (plan.num_trips, plan.grow.tolist()) == (5, [one.slot])
    world.num_free = 0
    assert world.plan(limits=LOOPED).num_trips == 1
    assert other.slot in world.plan(limits=LOOPED).decode


def test_guesses_get_pages_or_are_left_out_and_never_go_beside_prefill():
    world = World(num_free=2)
    one, other = world.decode(8, 2), world.decode(9, 3)
    drafts = np.full((4, 5), -1, np.int32)
    drafts[one.slot], drafts[other.slot, :2] = 7, 7
    plan = world.plan(limits=LOOPED, drafts=drafts)
    assert (plan.drafts_BD is drafts, plan.num_trips, plan.grow.tolist()) == (True, 1, [one.slot, one.slot])
    world.num_free = 1
    plan = world.plan(limits=LOOPED, drafts=drafts)
    assert plan.drafts_BD is None and plan.num_trips > 1
    world.num_free = 50
    world.wait(5)
    assert world.plan(limits=LOOPED, drafts=drafts).drafts_BD is None


def test_a_draft_model_reads_nothing_of_who_is_preempted():
    world = World(num_free=0)
    first, last = world.decode(9, 2), world.decode(9, 2)
    chunks = Chunk(first, 0, 8), Chunk(last, 0, 8)
    plan = world.plan(catch_up=chunks)
    assert (plan.preempt, plan.catch_up) == ((last,), chunks[:1])
    world.num_free = 2
    assert world.plan(catch_up=chunks).catch_up == chunks


def test_one_trip_when_somebody_waits_or_prefills_or_must_be_looked_at():
    def num_trips(change):
        world = World(num_slots=2)
        world.decode(6, 9)
        change(world)
        return world.plan(limits=LOOPED).num_trips

    assert num_trips(lambda world: None) == 8
    assert num_trips(lambda world: world.wait(5)) == 1
    assert num_trips(lambda world: world.prefill(30, 8, 8)) == 1
    assert num_trips(lambda world: world.slots.watched_B.__setitem__(0, True)) == 1


@st.composite
def worlds(draw):
    """Any state that the engine can reach, roughly: running sequences in all phases and a queue."""
    world = World(draw(st.integers(0, 40)), num_slots=8)
    world.num_sets = draw(st.sampled_from([1, 1, 3]))
    priorities = st.sampled_from(Priority)
    for _ in range(draw(st.integers(0, 8))):
        tokens, priority = draw(st.integers(2, 60)), draw(priorities)
        if draw(st.booleans()):
            world.decode(tokens, pages_for(tokens - 1, 4), draw(st.integers(1, 3)), priority=priority)
        else:
            done = draw(st.integers(0, tokens - 1))
            sequence = world.prefill(tokens, done, pages_for(tokens + 1, 4), priority=priority)
            if lacking := draw(st.sampled_from([0, 0, 2])):
                world.lacking[sequence.slot] = lacking
    for _ in range(draw(st.integers(0, 6))):
        world.wait(draw(st.integers(1, 60)), priority=draw(priorities)).num_pending = draw(st.sampled_from([0, 0, 1]))
    return world


def state_of(world):
    sequences = [s for s in [*world.slots.sequences, *world.waiting] if s is not None]
    figures = [[str(getattr(s, f.name)) for f in dataclasses.fields(s) if f.name != "keys"] for s in sequences]
    columns = [column.tolist() for column in vars(world.slots).values() if isinstance(column, np.ndarray)]
    return figures, columns


@given(worlds(), st.integers(0, 20), st.integers(0, 1), st.sampled_from([LIMITS, LOOPED]))
@settings(max_examples=500)
def test_a_plan_never_promises_what_is_not_there(world, step, num_promoted, limits):
    before = state_of(world)
    plan = world.plan(step, num_promoted, limits)
    assert state_of(world) == before, "the planner changed something"
    given_back = sum(world.num_releasable(s) for s in plan.preempt)
    filled = sum(world.lacking[s.slot] for s, _ in plan.fill)
    columns = len(plan.grow) + sum(a.num_columns - a.match.num_columns for a in plan.admit)
    assert filled + world.num_sets * columns <= world.num_free + given_back
    prefilling = [s for s in world.slots.prefilling() if s not in plan.preempt]
    assert {s.slot for s, _ in plan.fill} == {s.slot for s in prefilling if s.slot in world.lacking}
    assert len(plan.admit) <= world.slots.num_free + len(plan.preempt)
    assert sum(pages_for(c.length, LIMITS.tile_tokens) for c in plan.prefill) <= LIMITS.max_tiles

    decoding = world.slots.at(plan.decode)
    working = [*decoding, *(c.sequence for c in plan.prefill)]
    assert len(set(map(id, working))) == len(working), "a sequence works twice"
    assert not set(map(id, plan.preempt)) & set(map(id, working)), "a preempted sequence works"
    assert set(plan.grow.tolist()) <= set(plan.decode.tolist())
    due = np.broadcast_to(world.slots.num_due(plan.decode, plan.num_trips), len(decoding)).tolist()
    for s, num_due in zip(decoding, due, strict=True):
        pages = world.num_pages_B[s.slot] + (plan.grow == s.slot).sum()
        last = world.slots.num_tokens_B[s.slot] + num_due - 1
        assert pages * LIMITS.page_size >= last, "a decode row without room for its tokens"
    assert plan.num_trips == 1 or not (world.waiting or plan.prefill or plan.preempt)
    for chunk in plan.prefill:
        assert chunk.length >= 1 and chunk.start == chunk.sequence.num_scheduled

    assert admitted(plan) == world.waiting[: len(plan.admit)], "someone jumped the queue"
    kept = [
        s for s in world.slots.sequences if s and s not in plan.preempt and s.max_len > world.slots.num_tokens_B[s.slot]
    ]
    assert not plan.preempt or max(map(rank, kept), default=(0, 0)) < min(map(rank, plan.preempt)), "not the worst rank"
    if plan.preempt and plan.admit:
        assert all(s.band == BATCH for s in plan.preempt)
        assert all(s.band == INTERACTIVE for s in admitted(plan))
