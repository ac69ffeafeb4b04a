"""Pages that the device had no room for come back from the host's memory: answers stay what they are."""

from concurrent.futures import ThreadPoolExecutor
from itertools import count

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from kv.cache import abstract_cache, make_cache
from kv.row_cache import abstract_row_cache
from serving.config import EngineConfig
from serving.engine.executables import Executables
from serving.engine.page_programs import PagePrograms
from serving.engine.page_room import check_host_cache, num_host_pages
from serving.errors import ConfigError, EngineFailed
from serving.request import SamplingParams
from sharding.mesh import make_mesh
from sharding.rules import choose_rules
from sharding.spec import MeshSpec
from tests.engines import CONFIG, KEPT, PAGE_SIZE, request, tiny_engine
from tests.serving.engine.test_draft_model import ITSELF, D
from tests.serving.engine.test_pages import prompt, run_one
from tests.serving.engine.test_quantized import FORMATS, MODEL

BORDERS = [*range(3, 10), 31, 32, 33, 34]
ROOM = 32
SALTS = map(str, count())


def evict_all(engine):
    """By a request that takes every page, and has nothing in common with any other."""
    run_one(engine, request("all", prompt(0, 127), SamplingParams(max_tokens=1), cache_salt=next(SALTS)))


def answer_from_host(engine, asked):
    """The answer of a request whose pages have all been evicted, how many of its tokens were cached, and how many of
    these on the host."""
    evict_all(engine)
    before = engine.stats.host_cache_hits
    return *run_one(engine, asked), engine.stats.host_cache_hits - before


@pytest.mark.parametrize("changes", [{}, pytest.param({"model": MODEL, "formats": FORMATS}, marks=pytest.mark.slow)])
def test_warm_from_the_host_equals_cold_at_every_page_border(changes):
    """Also with pages of int8."""
    requests = [request(length, prompt(length, length)) for length in BORDERS]
    cold = tiny_engine(prefix_cache=False, **changes)
    engine = tiny_engine(num_pages=ROOM, host_pages=500, **changes)
    for asked, length in zip(requests, BORDERS, strict=True):
        expected, _ = run_one(cold, asked)
        assert run_one(engine, asked) == (expected, 0)
        full = (length - 1) // PAGE_SIZE * PAGE_SIZE
        assert answer_from_host(engine, asked) == (expected, full, full)


def test_what_is_still_on_the_device_is_shared_and_only_the_rest_comes_back():
    [expected] = [run_one(tiny_engine(prefix_cache=False), request("x", prompt(1, 50)))[0]]
    engine = tiny_engine(num_pages=ROOM, host_pages=500)
    run_one(engine, request("x", prompt(1, 50)))
    run_one(engine, request("y", prompt(2, 90)))  # evicts the end of the first
    assert run_one(engine, request("x", prompt(1, 50))) == (expected, 48)
    assert 0 < engine.stats.host_cache_hits < 48
    assert engine.stats.host_cache_queries == 50 + 90 + 50 - (48 - engine.stats.host_cache_hits)


def test_a_long_beginning_comes_back_as_far_as_can_be_copied_at_once():
    engine = tiny_engine(num_pages=ROOM, host_pages=500)
    expected = run_one(engine, request("x", prompt(1, 100)))
    engine._roster.pages.host._most_copies = 10
    found = answer_from_host(engine, request("x", prompt(1, 100)))
    assert found == (expected[0], 10 * PAGE_SIZE, 10 * PAGE_SIZE)


def test_the_host_keeps_no_more_pages_than_it_has_room_for():
    engine = tiny_engine(num_pages=ROOM, host_pages=7)
    for seed in range(6):
        run_one(engine, request(seed, prompt(seed, 60)))
    assert engine.stats.num_host_pages == 7
    held = engine._roster.pages.host._pages.values()
    assert sum(array.nbytes for page in held for array in page.arrays) == 7 * engine._programs.page_bytes


def test_a_page_leaves_the_device_once_its_copy_is_read():
    engine = tiny_engine(num_pages=ROOM, host_pages=50)
    for seed in range(3):
        run_one(engine, request(seed, prompt(seed, 60)))
    held = engine._roster.pages.host._pages.values()
    assert held and all(isinstance(array, np.ndarray) for page in held for array in page.arrays)


def test_without_a_second_tier_nothing_is_noted():
    engine = tiny_engine(num_pages=ROOM)
    for seed in range(3):
        run_one(engine, request(seed, prompt(seed, 60)))
    assert engine._roster.pages._cache.take_evicted() == [] and not engine._roster.pages.host._on_way


def test_a_failed_step_leaves_nothing_in_the_host_either():
    engine = tiny_engine(num_pages=ROOM, host_pages=50)
    run_one(engine, request("x", prompt(1, 60)))
    evict_all(engine)
    assert engine.stats.num_host_pages
    engine.recover(EngineFailed("test"))
    assert engine.stats.num_host_pages == 0 == run_one(engine, request("x", prompt(1, 60)))[1]


@pytest.mark.slow
def test_over_several_devices_and_beside_a_draft_model_answers_are_the_same():
    asked = request("x", prompt(1, 50))
    for changes in ({"mesh": "data=1,tensor=4"}, {"drafts": D, "drafter": ITSELF}):
        expected, _ = run_one(tiny_engine(prefix_cache=False, **changes), asked)
        engine = tiny_engine(num_pages=ROOM, host_pages=500, **changes)
        run_one(engine, asked)
        assert answer_from_host(engine, asked) == (expected, 48, 48)


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        ("float32", abstract_cache),
        pytest.param("bfloat16", abstract_row_cache, marks=pytest.mark.slow),
        ("int8", abstract_row_cache),
        pytest.param("fp8", abstract_cache, marks=pytest.mark.slow),
    ],
)
def test_pages_of_every_format_go_and_come_back_as_they_were(dtype, layout):
    """Over two devices, from the host and from where they still lie; nine pages, so that all programs are used."""
    mesh, rules = make_mesh(MeshSpec(tensor=2)), choose_rules(CONFIG, MeshSpec(tensor=2))
    row = (CONFIG.head_dim,) if layout is abstract_row_cache else ()
    abstract = layout(CONFIG, *row, 12, PAGE_SIZE, dtype, mesh, rules, "float32")
    rng = np.random.default_rng(0)
    full = jax.tree.map(
        lambda leaf: jax.device_put(rng.integers(1, 100, leaf.shape).astype(leaf.dtype), leaf.sharding), abstract
    )
    programs = PagePrograms(abstract, NamedSharding(mesh, PartitionSpec()), Executables(KEPT, mesh))
    with ThreadPoolExecutor() as pool:
        programs.compile(pool)
    taken = programs.take(full, range(1, 10))
    back = programs.put(
        make_cache(abstract), range(2, 11), [*taken[:4], *(tuple(map(np.asarray, t)) for t in taken[4:])]
    )
    for leaf, old in zip(jax.tree.leaves(back), jax.tree.leaves(full), strict=True):
        assert leaf.sharding == old.sharding
        assert np.array_equal(np.asarray(leaf)[:, 2:11], np.asarray(old)[:, 1:10]) and not np.asarray(leaf)[:, :2].any()


def test_what_cannot_be_kept_is_refused_in_a_sentence(monkeypatch):
    config = EngineConfig("x", host_cache_bytes=1000)
    check_host_cache(config)
    with pytest.raises(ConfigError, match="--host-cache 1,000 holds no page of 1,001 bytes"):
        num_host_pages(config, 1_001)
    assert num_host_pages(config, 300) == 3 and num_host_pages(EngineConfig("x", host_cache_bytes=0), 300) == 0
    with pytest.raises(ConfigError, match="--host-cache keeps pages of the prefix cache"):
        check_host_cache(EngineConfig("x", host_cache_bytes=1, prefix_cache=False))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="one host only; leave out --host-cache"):
        check_host_cache(config)
    check_host_cache(EngineConfig("x"))
