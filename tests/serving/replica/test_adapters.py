"""Names, places and who uses them: a place is given away when nobody can be using it any more."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import InvalidRequest, ModelNotFound, Overloaded
from serving.replica import adapters as module
from serving.replica.adapters import MAX_LOADS, MAX_NAME_CHARS, AdapterTable
from tests.fakes import FAKE_NAME, FakeEngineLoop
from tests.services import until


def table(num_adapters=2, **changes):
    return AdapterTable(FAKE_NAME, FakeEngineLoop(num_adapters=num_adapters), **{"is_fixed": False, **changes})


def test_a_model_is_the_base_or_an_adapter():
    adapters = table()
    adapters.load_now("one", "/1")
    adapters.load_now("two", "/2")
    assert adapters.find(FAKE_NAME) is None
    assert [(adapter.name, adapter.path, adapter.place) for adapter in map(adapters.find, ("one", "two"))] == [
        ("one", "/1", 0),
        ("two", "/2", 1),
    ]
    with pytest.raises(ModelNotFound, match="'gpt-9' is not served here, 'echo', 'one', 'two' are"):
        adapters.find("gpt-9")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (FAKE_NAME, "the name 'echo' is taken"),
        ("one", "the name 'one' is taken; unload it first"),
        ("", "must have 1 to 256 printable characters"),
        ("x" * (MAX_NAME_CHARS + 1), "must have 1 to 256 printable characters"),
        ("a\nb", "must have 1 to 256 printable characters"),
        ("three", "all 2 places for adapters are taken; unload one, or raise --max-loras"),
    ],
)
def test_a_name_that_cannot_be_given_is_refused(name, says):
    adapters = table()
    for each in ("one", "two"):
        adapters.load_now(each, "/x")
    with pytest.raises(InvalidRequest, match=says):
        adapters.load_now(name, "/x")


async def test_what_was_given_at_the_start_is_fixed_without_room_for_more():
    adapters = table(is_fixed=True)
    adapters.load_now("one", "/1")
    with pytest.raises(InvalidRequest, match="start with --max-loras N"):
        adapters.unload("one")
    with pytest.raises(InvalidRequest, match="start with --max-loras N"):
        await adapters.load("two", "/2")


async def test_a_load_that_fails_leaves_its_name_and_place():
    adapters = table(num_adapters=1)
    with pytest.raises(ModelNotFound, match="no adapter at /nowhere"):
        await adapters.load("one", "/nowhere")
    await adapters.load("one", "/1")
    assert adapters.find("one").place == 0


async def test_a_load_holds_its_name_and_place_also_when_nobody_waits_for_it():
    adapters = table(num_adapters=1)
    adapters._engine.go.clear()
    waiting = asyncio.create_task(adapters.load("one", "/1"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(ModelNotFound):
        adapters.find("one")
    with pytest.raises(InvalidRequest, match="all 1 places"):
        await adapters.load("two", "/2")
    with pytest.raises(InvalidRequest, match="'one' is taken"):
        await adapters.load("one", "/2")
    adapters._engine.go.set()
    await until(lambda: adapters.loaded)


async def unreachable(name="one", num_adapters=1):
    """A table whose first load waits for something that does not answer."""
    adapters = table(num_adapters=num_adapters)
    adapters._engine.go.clear()
    loading = asyncio.create_task(adapters.load(name, "gs://unreachable"))
    await asyncio.sleep(0)
    return adapters, loading


async def test_a_load_that_takes_too_long_is_given_up_and_its_place_is_free(monkeypatch):
    monkeypatch.setattr(module, "LOAD_S", 0.05)
    adapters, loading = await unreachable()
    with pytest.raises(ModelNotFound, match="'one' was given up while gs://unreachable was read"):
        await loading
    assert adapters.is_reading, "nothing can interrupt its thread"
    adapters._engine.go.set()
    await until(lambda: not adapters.is_reading)
    assert not adapters._engine.adapters, "it came back too late, and wrote nothing"
    await adapters.load("one", "/1")
    assert adapters._engine.adapters == {0: "/1"}


async def test_unloading_what_is_being_read_gives_it_up():
    adapters, loading = await unreachable()
    adapters.unload("one")
    with pytest.raises(ModelNotFound, match="was given up"):
        await loading
    adapters._engine.go.set()


async def test_a_load_waits_for_no_other():
    adapters, loading = await unreachable(num_adapters=2)
    adapters._engine.load_adapter = lambda place, path, may_write: may_write()
    await asyncio.wait_for(adapters.load("two", "/2"), 5)
    assert [adapter.name for adapter in adapters.loaded] == ["two"]
    adapters._engine.go.set()
    await loading


async def test_loads_that_do_not_end_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "LOAD_S", 0.0)
    adapters, loading = await unreachable()
    for number in range(MAX_LOADS):
        with pytest.raises(ModelNotFound, match="was given up"):
            await loading
        loading = asyncio.create_task(adapters.load(f"again {number}", "gs://unreachable"))
    with pytest.raises(Overloaded, match="8 adapters are being read already"):
        await loading
    adapters._engine.go.set()


async def test_closing_gives_up_what_is_being_read():
    adapters, loading = await unreachable()
    adapters.close()
    with pytest.raises(ModelNotFound, match="was given up"):
        await loading
    adapters._engine.go.set()


def test_an_unloaded_adapter_keeps_its_place_until_its_last_answer_ends():
    adapters = table(num_adapters=1)
    adapters.load_now("one", "/1")
    adapter = adapters.find("one")
    for each in (adapter, adapter, None):
        adapters.enter(each)
    adapters.unload("one")
    with pytest.raises(ModelNotFound, match="'one' was just unloaded"):
        adapters.enter(adapter)
    with pytest.raises(ModelNotFound, match="there is no adapter 'one'"):
        adapters.unload("one")
    adapters.leave(adapter)
    with pytest.raises(InvalidRequest, match="all 1 places"):
        adapters.load_now("one", "/1")
    adapters.leave(adapter)
    adapters.load_now("one", "/1")
    assert adapters.find("one") != adapter, "it could find the old one's cached pages"


@settings(max_examples=40)
@given(st.data())
def test_no_place_has_two_adapters_and_none_is_lost(data):
    """Whatever order adapters and answers come and go in."""
    num_places, adapters, answers = 3, table(num_adapters=3), []
    for _ in range(data.draw(st.integers(0, 30))):
        choices = {
            "load": len(adapters._free),
            "unload": len(adapters.loaded),
            "enter": len(adapters.loaded),
            "leave": len(answers),
        }
        match data.draw(st.sampled_from([name for name, count in choices.items() if count])):
            case "load":
                free = {"a", "b", "c"} - {adapter.name for adapter in adapters.loaded}
                adapters.load_now(data.draw(st.sampled_from(sorted(free))), "/x")
            case "unload":
                adapters.unload(data.draw(st.sampled_from(adapters.loaded)).name)
            case "enter":
                answers.append(data.draw(st.sampled_from(adapters.loaded)))
                adapters.enter(answers[-1])
            case "leave":
                adapters.leave(answers.pop(data.draw(st.integers(0, len(answers) - 1))))
        taken = [adapter.place for adapter in {*adapters.loaded, *answers}]
        assert sorted([*taken, *adapters._free]) == list(range(num_places))
