"""Shapes are few and hold every plan; the packed upload says what the plan says."""

import numpy as np
import pytest

from kv.page_keys import PageKeys
from kv.page_table import PageTable
from serving.engine.api import EngineRequest, LoadedAdapter
from serving.engine.batch import (
    NOTHING,
    BatchLayout,
    Ladder,
    SlotSettings,
    StepShape,
    build_batch,
    choose_shape,
    step_shapes,
)
from serving.engine.plan import Chunk, StepPlan
from serving.engine.prompt_logprobs import UNASKED
from serving.engine.sequence import Sequence
from serving.engine.slots import SlotTable
from serving.errors import EngineFailed
from serving.request import SamplingParams

TILE = 4


def sequence(tokens, max_tokens=9, stops=(), adapter=None, **sampling):
    request = EngineRequest("x", tuple(tokens), SamplingParams(**sampling), adapter=adapter)
    return Sequence(request, max_tokens=max_tokens, seed=-1, keys=PageKeys(4), stop_ids=frozenset(stops))


@pytest.mark.parametrize(("slots", "tiles"), [(1, 1), (4, 2), (64, 8), (100, 5)])
def test_every_plan_has_a_shape_and_the_set_is_small(slots, tiles):
    shapes = step_shapes(slots, tiles)
    assert len(shapes) <= 20
    for rows in range(1, slots + 1):
        for num_tiles in range(tiles + 1):
            assert any(s.rows >= rows and s.tiles >= num_tiles and bool(s.tiles) == bool(num_tiles) for s in shapes)


def test_a_plan_gets_the_smallest_shape_that_holds_it():
    plan = StepPlan(prefill=(Chunk(sequence(range(20)), 0, 9),))
    assert choose_shape(plan, step_shapes(64, 8), TILE) == StepShape(tiles=4, rows=8)
    decode = StepPlan(decode=np.arange(5))
    assert choose_shape(decode, step_shapes(64, 8), TILE) == StepShape(tiles=0, rows=8)


def test_a_missing_shape_is_an_error():
    plan = StepPlan(decode=np.arange(5))
    with pytest.raises(EngineFailed, match="no compiled step shape holds 5 rows"):
        choose_shape(plan, step_shapes(4, 1), TILE)


def test_the_packed_vector_holds_the_plan():
    table, slots, settings = PageTable(4, 3), SlotTable(4), SlotSettings(4)
    chunk = sequence(range(10, 20), temperature=0.25, top_k=3, prompt_logprobs=0)
    other = sequence([1])
    decode = sequence(
        [5, 6, 7],
        temperature=0.0,
        top_p=0.5,
        frequency_penalty=0.75,
        logprobs=0,
        stops=(9,),
        max_tokens=2,
        adapter=LoadedAdapter("a", "/a", place=2, number=7),
    )
    for s in (chunk, other, decode):
        slots.enter(s)
        settings.set(s.slot, s)
    for slot, row in ((0, [4, 5, 6]), (2, [8])):
        table.append(slot, len(row))
        table.fill(slot, row)
    layout = BatchLayout(StepShape(tiles=2, rows=4), pages_per_slot=3, tile_tokens=TILE, has_adapters=True)
    plan = StepPlan(decode=np.array([2]), prefill=(Chunk(chunk, 4, 6),), num_trips=8)
    packed = build_batch(plan, layout, table, slots, settings)

    fields, pages, tile_rows, tokens, positions, following, _, adapters = layout.split(packed)
    slot, position, sample_at, num_trips, sample_position, temperature, top_k, top_p, _, *rest = fields
    assert packed.shape == (layout.size,)
    assert slot.tolist() == [2, 0, 4, 4]  # 4 is the scrap slot
    assert position.tolist() == [2, NOTHING, NOTHING, NOTHING]
    assert sample_at.tolist() == [0, 4 + 5, NOTHING, NOTHING]  # the chunk's last token, after the four rows
    assert num_trips.tolist() == [2, 1, 0, 0]  # no more than the sequence may have
    assert sample_position.tolist()[:2] == [3, 10]
    assert temperature.view(np.float32).tolist()[:2] == [0.0, 0.25] and top_k.tolist()[:2] == [0, 3]
    assert top_p.view(np.float32).tolist()[:2] == [0.5, 1.0]
    seed_high, seed_low, *rest = rest
    assert (seed_high[0], seed_low[0]) == (-1, -1)
    repetition, presence, frequency, counted, num_edits, logprobs, masked, *stops = rest
    penalties = [x.view(np.float32).tolist()[:2] for x in (repetition, presence, frequency)]
    assert penalties == [[1.0, 1.0], [0.0, 0.0], [0.75, 0.0]]
    assert [x.tolist() for x in (counted, num_edits, logprobs, masked)] == [
        [1, 0, 0, 0],
        [0] * 4,
        [1, 0, 0, 0],
        [0] * 4,
    ]
    assert [x.tolist()[:2] for x in stops] == [[9, -1], [-1, -1], [-1, -1], [-1, -1]]
    assert pages.tolist() == [[8, 0, 0], [4, 5, 6], [0, 0, 0], [0, 0, 0]]
    assert tile_rows.ravel().tolist() == [1, 1]
    assert adapters.ravel().tolist() == [3, 0, 0, 0]
    assert tokens.tolist() == [[14, 15, 16, 17], [18, 19, 0, 0]]
    assert positions.tolist() == [[4, 5, 6, 7], [8, 9, NOTHING, NOTHING]]
    assert following.tolist() == [[15, 16, 17, 18], [19, UNASKED, UNASKED, UNASKED]]


def test_accelerators_get_few_programs():
    """Where a row more costs nothing and a program takes long to compile."""
    ladder = Ladder(least=32, factor=4, least_tiles=4, beside_few=False)
    assert step_shapes(128, 16, ladder=ladder) == (
        StepShape(0, 32), StepShape(0, 128), StepShape(4, 128), StepShape(16, 128),
    )  # fmt: skip
    assert [shape.rows for shape in step_shapes(3, 1, ladder=ladder)] == [3, 3]
