"""Kept programs do what compiled ones do, and nothing else is ever taken for them."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import Barrier
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from kv.cache import ColumnCache, abstract_cache, make_cache
from model.config import ModelConfig
from serving.engine import executables
from serving.engine.executables import Executables, describe, num_compile_threads
from sharding.mesh import make_mesh
from sharding.rules import choose_rules
from sharding.spec import MeshSpec
from tests.damage import DAMAGES

SPEC = MeshSpec.parse("data=1,tensor=2")
MESH = make_mesh(SPEC)
NUMBER = np.float32(1.5)


@pytest.fixture
def cache() -> ColumnCache:
    """Arrays over two devices in a tree of our own, all zero."""
    config = ModelConfig.tiny()
    return make_cache(abstract_cache(config, 3, 4, "float32", MESH, choose_rules(config, SPEC)))


@pytest.fixture
def compiles(monkeypatch):
    """How many arguments each program had that was compiled."""
    seen, compile_ = [], Executables._compile

    def counted(kept, jitted, args):
        seen.append(len(args))
        return compile_(kept, jitted, args)

    monkeypatch.setattr(Executables, "_compile", counted)
    return seen


def adder(folder, cache, *described):
    """The program of one start: it adds a number to every page, in place."""

    def add(pages, number):
        return jax.tree.map(lambda leaf: leaf + number, pages), number * 2

    shardings = jax.tree.map(lambda leaf: leaf.sharding, cache)
    jitted = jax.jit(add, donate_argnums=0, out_shardings=(shardings, None))
    return Executables(str(folder), MESH).compiled(jitted, (cache, jax.ShapeDtypeStruct((), np.float32)), *described)


def check(program, cache):
    added, double = program(cache, NUMBER)
    assert type(added) is type(cache) and float(double) == 3.0
    assert {leaf.sharding for leaf in jax.tree.leaves(added)} == {leaf.sharding for leaf in jax.tree.leaves(cache)}
    assert all((np.asarray(leaf) == NUMBER).all() for leaf in jax.tree.leaves(added))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache)), "donated, as the compiled one does"


def test_the_next_start_compiles_nothing(tmp_path, cache, compiles):
    adder(tmp_path, cache)
    kept = adder(tmp_path, cache)
    assert compiles == [2]
    assert kept.memory_analysis().alias_size_in_bytes > 0
    check(kept, cache)


def test_what_xlas_own_cache_has_is_not_taken_from_there(tmp_path, cache):
    """A program from there would be kept without some of its functions, and fail where it is run."""
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        compilation_cache.reset_cache()
        jax.jit(lambda x: x + 1)(np.float32(1))
        assert any((tmp_path / "xla").iterdir()), "it is in use until the first program"
        adder(tmp_path / "first", cache)
        adder(tmp_path / "second", cache)
        check(adder(tmp_path / "second", cache), cache)
        assert len(list((tmp_path / "xla").glob("jit_add*"))) == 0
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


def test_without_a_folder_everything_is_compiled(cache, compiles):
    for _ in range(2):
        Executables(None, MESH).compiled(jax.jit(lambda x: x + 1), (np.zeros(2, np.float32),))
    assert compiles == [1, 1]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_compiled_anew_and_mended(tmp_path, cache, compiles, caplog, damage):
    adder(tmp_path, cache)
    [file] = (path for path in tmp_path.rglob("*") if path.is_file())
    DAMAGES[damage](file)
    adder(tmp_path, cache)
    assert len(compiles) == 2 and ("compiling it" in caplog.text or damage == "gone")
    check(adder(tmp_path, cache), cache)
    assert len(compiles) == 2


def test_where_nothing_can_be_kept_it_is_said_and_the_start_goes_on(tmp_path, cache, caplog):
    (tmp_path / "file").write_text("no folder")
    check(adder(tmp_path / "file", cache), cache)
    assert "cannot keep" in caplog.text


def test_whatever_differs_is_another_program(tmp_path, cache, compiles, monkeypatch):
    adder(tmp_path, cache, "a")
    adder(tmp_path, cache, "b")
    assert len(compiles) == 2
    monkeypatch.setattr(executables, "revision", lambda: "edited")
    adder(tmp_path, cache, "a")
    assert len(compiles) == 3
    monkeypatch.setenv("XLA_FLAGS", "--of=another_kind")
    adder(tmp_path, cache, "a")
    assert len(compiles) == 4


def test_only_the_newest_surroundings_stay(tmp_path, cache, monkeypatch):
    for edit in range(executables.NUM_KEPT + 3):
        monkeypatch.setattr(executables, "revision", lambda edit=edit: str(edit))
        adder(tmp_path, cache)
    assert len(list((tmp_path / "programs").iterdir())) == executables.NUM_KEPT


def test_a_description_is_the_same_in_every_process_and_tells_values_apart():
    @dataclass(frozen=True)
    class Spec:
        mesh: object
        kernel: object
        config: ModelConfig

    spec = Spec(MESH, partial(abstract_cache, widened="float32"), ModelConfig.tiny())
    assert " at 0x" not in describe(spec)
    others = (
        replace(spec, kernel=abstract_cache),
        replace(spec, kernel=partial(abstract_cache, widened="bfloat16")),
        replace(spec, mesh=None),
        replace(spec, config=ModelConfig.tiny(num_layers=7)),
    )
    assert len({describe(spec), *map(describe, others)}) == 5
    with pytest.raises(AssertionError, match="next process"):
        describe((spec, object()))


def test_programs_for_a_tpu_are_compiled_one_at_a_time_while_the_next_is_lowered():
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform="tpu")]))
    both_are_lowered, compiling = Barrier(2, timeout=10), []

    class Jitted:
        def lower(self):
            return self

        def compile(self):
            compiling.append(self)
            assert compiling == [self]
            return compiling.pop()

    class First(Jitted):
        def compile(self):
            both_are_lowered.wait()
            return super().compile()

    class Second(Jitted):
        def lower(self):
            both_are_lowered.wait()
            return self

    programs = [First(), Second()]
    with ThreadPoolExecutor(num_compile_threads(mesh)) as pool:
        assert [*pool.map(lambda program: Executables(None, mesh).compiled(program, ()), programs)] == programs
