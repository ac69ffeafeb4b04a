"""How much batch work shares a step with people's: what costs little, all of it; what costs much, a bounded part."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.page_table import pages_for
from serving.engine.sharing import share_step
from serving.request import Priority
from tests.serving.engine.test_bands import Trace, ask
from tests.serving.engine.test_plan import LIMITS, World, chunks

BATCH = Priority.BATCH
TILE = LIMITS.tile_tokens


@dataclasses.dataclass
class Costs:
    """Seconds of a step, known of all sizes: `base` and so much for each row and tile."""

    base: float = 1.0
    row: float = 0.0
    tile: float = 0.0

    def of_step(self, num_rows, num_tiles):
        return self.base + self.row * num_rows + self.tile * num_tiles

    def at_most(self, num_rows, num_tiles):
        return self.of_step(num_rows, num_tiles)


class Unknown:
    def of_step(self, num_rows, num_tiles):
        return None

    def at_most(self, num_rows, num_tiles):
        return 0.0


class Dearest(Costs):
    def at_most(self, num_rows, num_tiles):
        return math.inf


DEAR = Costs(row=0.3, tile=1.0)


def crowd(people=2, batch=6, **kwargs):
    world = World(num_free=200, num_slots=people + batch + 3, **kwargs)
    for _ in range(people):
        world.decode(6, 2)
    return world, [world.decode(6, 2, priority=BATCH) for _ in range(batch)]


@pytest.mark.parametrize("costs", [None, Costs(), Costs(row=1e-3, tile=1e-3)])
def test_where_rows_cost_nothing_all_decode_and_prefill_together(costs):
    world, _ = crowd()
    new = world.wait(30, priority=BATCH)
    plan = world.plan(step=1, costs=costs)
    assert len(plan.decode) == 8 and chunks(plan) == [(new, 0, 24)]


def test_where_rows_cost_much_batch_rows_take_turns():
    world, batch = crowd()
    seen = []
    for step in (1, 2, 3):
        plan = world.plan(step=step, costs=DEAR)
        assert len(plan.decode) == 5, "2.5 s are less than 1.7 times the 1.6 s of two, and eight would take 3.4"
        assert {0, 1} <= set(plan.decode.tolist()), "people always decode"
        world.slots.decoded_at_B[plan.decode] = step
        seen.append({s.slot for s in batch} & set(plan.decode.tolist()))
    assert seen[0] | seen[1] == {s.slot for s in batch} and seen[2] == seen[0]


def test_while_somebody_waits_for_a_first_token_batch_goes_along_only_where_that_costs_nothing():
    world, _ = crowd()
    new = world.wait(10)
    for costs, rows in ((DEAR, [0, 1]), (Costs(tile=1.0), [*range(8)])):
        plan = world.plan(step=1, costs=costs)
        assert plan.decode.tolist() == rows and chunks(plan) == [(new, 0, 10)]


def test_a_batch_prompt_that_would_hold_people_up_waits_for_the_floor():
    world, _ = crowd()
    new = world.wait(30, priority=BATCH)
    assert not world.plan(step=LIMITS.floor_every - 1, costs=DEAR).prefill
    plan = world.plan(step=LIMITS.floor_every, costs=DEAR)
    assert len(plan.decode) == 8 and chunks(plan) == [(new, 0, TILE)], "three tiles: 6.7 s, and two rows alone 1.6"
    dearest = world.plan(step=LIMITS.floor_every, costs=Dearest())
    assert len(dearest.decode) == 3 and chunks(dearest) == [(new, 0, TILE)], "something always goes on"


@pytest.mark.parametrize("batch", [0, 6])
def test_a_persons_prompt_has_the_whole_chunk_whatever_it_costs(batch):
    world, _ = crowd(batch=batch)
    new = world.wait(24)
    for costs in (Costs(row=0.3, tile=2.0), Dearest(), Unknown()):
        assert chunks(world.plan(step=1, costs=costs)) == [(new, 0, 24)]


def test_a_promoted_sequence_decodes_with_people_and_its_prompt_holds_nobody_up():
    world, batch = crowd()
    batch[0].band, world.slots.batch_B[batch[0].slot] = 0, False
    waiting = world.wait(30, priority=BATCH)
    waiting.band = 0
    world.waiting.insert(0, world.waiting.pop())
    new = world.wait(10)
    plan = world.plan(step=1, costs=DEAR)
    assert batch[0].slot in plan.decode.tolist() and chunks(plan) == [(new, 0, 10)]


def test_in_the_floors_step_a_tile_comes_before_more_rows():
    """Eight rows would be cheap enough, but not beside the tile that goes along."""
    world, _ = crowd()
    new = world.wait(30, priority=BATCH)
    plan = world.plan(step=LIMITS.floor_every, costs=Costs(base=1.0, row=0.3, tile=4.0))
    assert len(plan.decode) == 2 + 1 and chunks(plan) == [(new, 0, TILE)]


def test_beside_peoples_prompts_a_batch_prompt_goes_on_only_if_none_did_for_long():
    every = LIMITS.floor_every
    world, _ = crowd()
    world.slots.batch_prompt_at = every + 1
    world.wait(30, priority=BATCH)
    new = world.wait(10)
    seen = [step for step in range(1, every * (every + 2) + 1) if len(world.plan(step=step, costs=DEAR).prefill) == 2]
    assert chunks(world.plan(step=every, costs=DEAR)) == [(new, 0, 10)]
    assert seen == [every * (every + 2)], "the first of the floor's steps that many after the last tile"


def test_the_last_step_with_a_batch_prompt_is_remembered():
    trace = Trace(num_slots=4)
    trace.submit(ask("person", 8, 8))
    trace.advance()
    assert trace.engine._roster.slots.batch_prompt_at == 0
    trace.submit(ask("batch", 8, 8, BATCH))
    trace.advance()
    trace.advance()
    assert trace.engine._roster.slots.batch_prompt_at == 2


@pytest.mark.parametrize(("prompt", "left"), [(10, TILE), (30, 0)])
def test_in_the_floors_step_a_promoted_prompt_has_what_peoples_leave(prompt, left):
    """Three tiles in all, of which the promoted one, first in rank, would take every one."""
    world, _ = crowd()
    promoted = world.prefill(40, 0, 11, priority=BATCH)
    promoted.band, world.slots.batch_B[promoted.slot] = 0, False
    new = world.wait(prompt)
    plan = world.plan(step=LIMITS.floor_every**2, costs=DEAR)
    found = {id(sequence): length for sequence, _, length in chunks(plan)}
    assert found.get(id(promoted), 0) == left and found[id(new)] == min(prompt, 3 * TILE)


def test_what_nobody_has_measured_is_tried_by_people_alone_first():
    world, _ = crowd()
    assert world.plan(step=1, costs=Unknown()).decode.tolist() == [0, 1]


def test_without_people_nothing_is_held_back():
    world, _ = crowd(people=0)
    world.wait(30, priority=BATCH)
    assert share_step(world.waiting, world.slots, LIMITS, DEAR, 1) is None


@given(
    st.integers(0, 5), st.integers(0, 12),
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from(Priority)), max_size=5),
    st.builds(Costs, st.floats(0.1, 5), st.floats(0, 1), st.floats(0, 5)), st.integers(1, 300),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_batch_work_makes_no_step_longer_than_agreed(people, batch, prompts, costs, step):
    world, _ = crowd(people, batch)
    for prompt, priority in prompts:
        world.wait(prompt, priority=priority)
    plan = world.plan(step=step, costs=costs)
    first = [c for c in plan.prefill if c.sequence.request.priority is not BATCH]
    if not people:
        return
    own_tiles = sum(pages_for(c.length, TILE) for c in first)
    tiles = sum(pages_for(c.length, TILE) for c in plan.prefill)
    rows, floor_s = len(plan.decode) + bool(plan.prefill), LIMITS.share_floor * costs.of_step(people, 0)
    most = costs.of_step(people + bool(first), own_tiles) * (1.0 if first else LIMITS.share)
    least = (0, 0)
    if step % LIMITS.floor_every == 0:
        most, is_due = max(most, floor_s), not first or step >= LIMITS.floor_every**2
        least = (1, 1) if is_due else (0, 0)
    is_least = len(plan.decode) - people <= least[0] and tiles - own_tiles <= least[1]  # goes along whatever it costs
    assert is_least or costs.of_step(rows, tiles) <= most + 1e-9


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40), st.sampled_from(Priority)), min_size=1, max_size=12),
    st.sampled_from([DEAR, Unknown(), Costs(row=9.0)]),
)
@settings(max_examples=40, deadline=None)
def test_all_end_whole_however_dear_company_is(requests, costs):
    trace = Trace(num_pages=60, num_slots=4)
    trace.engine._times.costs = costs
    for i, request in enumerate(requests):
        trace.submit(ask(i, *request))
    trace.run_to_end(max_steps=60_000)
    trace.check_answers()
