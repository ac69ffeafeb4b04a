"""Engines on several hosts take the same steps, whatever their clocks say; who dies, fails or computes something else
is named, and then all end."""

import random
import threading
import time
from types import SimpleNamespace

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.engine.api import EngineRequest, EngineState
from serving.engine.inputs import StepInputs
from serving.engine.loop import EngineThread, take_in
from serving.engine.plan import Limits
from serving.errors import ConfigError, EngineFailed
from serving.hosts import connection
from serving.hosts.digests import Digests
from serving.hosts.messages import inputs_from, inputs_to
from serving.request import FinishReason, Priority, SamplingParams
from tests.engines import PAGE_SIZE, counting_engine
from tests.grammars import compiler, schema_grammar
from tests.serving.engine.test_loop import LONG, Listener
from tests.slices import Background, gathered, ignore

LIMITS = Limits(PAGE_SIZE, 32, 2, max_trips=4)


def engine_of_a_host():
    """Its clock is a measured one, so that its own times differ from everybody else's."""
    return counting_engine(LIMITS, trip_s=None)


def follow(guest, engine):
    """What `serving.hosts.build.follow` does once the model is loaded."""
    engine.digest = 0
    for inputs in guest.follower.inputs(restore=None):
        for command in inputs.commands:
            take_in(engine, command)
        engine.step(inputs.now, inputs.took_s)
        guest.follower.say("digest", engine.digest)


@pytest.fixture
def slice_of_three():
    """Host 0's thread, and two others that follow it in threads of this process."""
    with gathered(3) as (hosts, guests):
        leader, followers = engine_of_a_host(), [engine_of_a_host() for _ in guests]
        for guest, engine in zip(guests, followers, strict=True):
            threading.Thread(target=follow, args=(guest, engine), daemon=True).start()
        loop, listener = EngineThread(leader, lambda: 0, None, hosts), Listener()
        loop.start(listener)
        yield SimpleNamespace(**locals())
        loop.stop()


def test_all_hosts_plan_alike(slice_of_three):
    it, rng = slice_of_three, random.Random(1)
    for number in range(40):
        priority = rng.choice([Priority.INTERACTIVE, Priority.BATCH])
        prompt = tuple(rng.randrange(50) for _ in range(rng.randint(1, 70)))
        sampling = SamplingParams(max_tokens=rng.randint(1, 40))  # no seed: host 0 draws it
        it.loop.submit(EngineRequest(str(number), prompt, sampling, priority=priority))
        if rng.random() < 0.2:
            it.loop.abort(str(rng.randrange(number + 1)))
    it.listener.wait(lambda: len(it.listener.ended) == 40)
    it.loop.stop()
    assert it.loop.state is EngineState.STOPPED
    assert [guest.ended.get(timeout=5) for guest in it.guests] == [(0, ""), (0, "")]
    end = time.monotonic() + 5
    while any(behind(engine, it.leader) for engine in it.followers):
        assert time.monotonic() < end, "the last steps are still on their way"
        time.sleep(0.01)
    plans = [[plan_of(record) for record in engine.ring.records] for engine in (it.leader, *it.followers)]
    assert plans[0] == plans[1] == plans[2]
    assert it.leader.digest == it.followers[0].digest == it.followers[1].digest != 0
    assert {record.num_trips for record in it.leader.ring.records} > {1}, "measured times had a say"


def behind(engine, leader):
    """A step is counted when it is dispatched, and in the digest when it was read."""
    return engine.stats.num_steps < leader.stats.num_steps or engine.digest != leader.digest


def plan_of(record):
    return record.shape, record.num_trips, record.prefill_tokens, record.free_pages, record.admitted, record.preempted


def test_a_killed_host_is_named_and_the_others_hear_of_it(slice_of_three):
    it = slice_of_three
    it.loop.submit(EngineRequest("a", (1, 2), LONG))
    it.guests[1].vanish()
    assert it.guests[0].ended.get(timeout=5) == (
        1, f"the hosts cannot go on: {it.hosts.name(2)} is lost: it closed its connection."
    )  # fmt: skip
    assert it.loop.state is EngineState.FAILED
    assert it.loop.failure == f"{it.hosts.name(2)} is lost: it closed its connection"


def test_a_silent_host_is_named(monkeypatch):
    monkeypatch.setattr(connection, "LOST_S", 0.5)
    monkeypatch.setattr(connection, "BEAT_S", 0.05)
    with gathered(2) as (hosts, [guest]):
        guest.connection._closed.set()  # its heart stops
        with pytest.raises(EngineFailed, match=r"host 1 \(.*\) is lost: it was not heard of for 0\.5 s"):
            hosts.until("ready", 5, ignore)


def test_hosts_end_with_host_0():
    with gathered(3) as (hosts, guests):
        for connected in hosts._connections.values():
            connected.close()
        assert [guest.ended.get(timeout=5) for guest in guests] == [
            (1, "host 0 closed its connection; this host ends, too.")
        ] * 2


def test_a_host_that_computes_something_else_is_named(slice_of_three, monkeypatch):
    it = slice_of_three
    programs = it.followers[1]._programs
    right = programs.run
    monkeypatch.setattr(programs, "run", lambda *args: (right(*args)[0] + 1, right(*args)[1]))
    it.loop.submit(EngineRequest("a", (1, 2), SamplingParams(max_tokens=5)))
    assert it.guests[0].ended.get(timeout=5)[0] == 1
    assert it.loop.failure == "host 2 computed something else than host 0 in step 2"


def test_a_step_that_raises_ends_all_hosts(slice_of_three, monkeypatch):
    it = slice_of_three
    monkeypatch.setattr("serving.hosts.leader.GRACE_S", 0.05)
    it.leader._programs.num_to_fail = 1
    it.loop.submit(EngineRequest("a", (1, 2), LONG))
    it.listener.wait(lambda: "a" in it.listener.ended)
    assert it.listener.ended["a"].finish_reason is FinishReason.ERROR
    assert [guest.ended.get(timeout=5)[0] for guest in it.guests] == [1, 1]
    assert it.loop.failure.startswith("host 0: the device step failed (RuntimeError: device lost)")


def test_what_a_host_fails_of_is_told():
    with gathered(2) as (hosts, [guest]):
        guest.follower.say("failed", "the checkpoint has a hole.")
        assert guest.ended.get(timeout=5) == (1, f"the hosts cannot go on: {hosts.name(1)}: the checkpoint has a hole.")


def test_host_0_waits_until_all_are_ready_and_names_who_is_late():
    seen = []
    with gathered(3) as (hosts, guests):
        guests[0].follower.say("ready", {"KV pages": "9"})
        with pytest.raises(ConfigError, match=r"^not ready within 0 s: host 2 \(.*\); the logs there"):
            hosts.until("ready", 0.3, seen.append)
        waiting = Background(hosts.until, "ready", 5, ignore)
        guests[1].follower.say("ready", {"KV pages": "8"})
        assert waiting.result() == {1: {"KV pages": "9"}, 2: {"KV pages": "8"}}
    assert seen[-1] == f"waiting until ready: {hosts.name(2)}"


class Same:
    """A stand-in for a matcher."""

    def __init__(self, definition):
        self.definition = definition

    def __eq__(self, other):
        return self.definition == other.definition


ints, texts = st.integers(-(2**63), 2**63 - 1), st.text(max_size=9)
id_tuples = st.lists(st.integers(0, 2**31), max_size=4).map(tuple)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_p=st.floats(0.001, 1),
    seed=st.none() | ints,
    stop=st.lists(st.text(min_size=1, max_size=9), max_size=2).map(tuple),
    stop_token_ids=id_tuples,
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3).map(lambda d: tuple(d.items())),
    banned_token_ids=id_tuples,
    logprobs=st.none() | st.integers(0, 20),
)
requests = st.builds(
    EngineRequest,
    texts,
    id_tuples,
    samplings,
    cache_salt=texts,
    priority=st.sampled_from(Priority),
    deadline=st.none() | st.floats(0, 1e9),
    matcher=st.none() | st.builds(Same, texts),
    after=texts,
    embed=st.booleans(),
)


@settings(max_examples=30)
@given(st.lists(requests | texts, max_size=2).map(tuple), st.floats(0, 1e9), st.floats(0, 1e3))
def test_inputs_arrive_as_they_were(commands, now, took_s):
    inputs = StepInputs(commands, now, took_s)
    assert inputs_from(orjson.loads(orjson.dumps(inputs_to(inputs))), Same) == inputs


def test_a_grammar_arrives_at_its_beginning():
    matcher = compiler().compile(schema_grammar({"type": "integer"}))
    restored = compiler().restore(matcher.definition)
    assert restored.native.compute_bitmask() == matcher.native.compute_bitmask()


@given(st.lists(st.booleans(), max_size=30), st.integers(0, 12))
def test_the_first_difference_is_found_whoever_is_ahead(turns, odd):
    """Host 1 says something else in step `odd`; a turn is a step of host 0 or of host 1."""
    digests, mine, theirs = Digests([1]), 0, 0
    for is_mine in turns:
        mine, theirs = mine + is_mine, theirs + (not is_mine)
        said = digests.add_mine(mine) if is_mine else digests.add(1, -1 if theirs == odd else theirs)
        if odd and max(mine, theirs) >= odd == min(mine, theirs):
            assert said == f"host 1 computed something else than host 0 in step {odd}"
            return
        assert said == ""
        assert digests.lag == max(mine - theirs, 0)
