"""The engine's thread: everything submitted ends exactly once, also when it is aborted, refused, stopped or failing."""

import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from serving.engine import commit
from serving.engine.api import EngineState, StepNews
from serving.engine.build import TILE_TOKENS
from serving.engine.loop import MAX_FAILURES, EngineThread
from serving.engine.plan import Limits
from serving.errors import EngineFailed, InvalidRequest, Overloaded
from serving.request import FinishReason, SamplingParams
from tests.engines import PAGE_SIZE, counting_engine, request, run, tiny_engine

LONG = SamplingParams(temperature=0.0, max_tokens=100)


class Listener:
    """Collects steps and lets a test wait for the end of requests."""

    def __init__(self):
        self.ended, self.tokens, self.steps = {}, {}, []
        self._news = threading.Condition()

    def __call__(self, step):
        with self._news:
            self.steps.append(step)
            for output in step.news:
                assert output.request_id not in self.ended, "news after the end"
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    self.ended[output.request_id] = output
            self._news.notify_all()

    def wait(self, condition, timeout_s=30):
        with self._news:
            assert self._news.wait_for(condition, timeout_s), f"not in {timeout_s} s; ended: {list(self.ended)}"


@pytest.fixture
def started(tmp_path):
    """Start an engine in its thread; checks on the way out that nothing is left of any request."""
    loops = []

    def start(engine):
        loop, listener = EngineThread(engine, lambda: 0, tmp_path), Listener()
        loop.start(listener)
        loops.append((loop, engine))
        return loop, listener

    yield start
    for loop, engine in loops:
        loop.stop()
        assert loop.state is EngineState.STOPPED
        engine.check_integrity()
        assert engine.load.free_pages == engine.load.total_pages


def test_requests_run_and_the_load_is_reported(started):
    loop, listener = started(tiny_engine())
    for i in range(6):
        loop.submit(request(i, [i, 2, 3]))
    listener.wait(lambda: len(listener.ended) == 6)
    assert {o.finish_reason for o in listener.ended.values()} == {FinishReason.LENGTH}
    assert all(len(tokens) == 12 for tokens in listener.tokens.values())
    assert listener.steps[-1].stats.generation_tokens == 72
    assert listener.steps[-1].stats.num_compiles_after_ready == 0
    assert loop.load.free_slots == loop.load.total_slots == 4


def test_abort_ends_a_request_within_a_step(started):
    loop, listener = started(tiny_engine())
    loop.submit(request("a", [1, 2, 3], LONG))
    listener.wait(lambda: listener.tokens.get("a"))
    loop.abort("a")
    listener.wait(lambda: "a" in listener.ended)
    assert listener.ended["a"].finish_reason is FinishReason.ABORT
    loop.abort("a")
    loop.abort("never heard of")
    loop.submit(request("b", [1]))
    listener.wait(lambda: "b" in listener.ended)


class Busy:
    """An engine whose device is busy for half a minute, until two messages have come."""

    def __init__(self):
        self.load, self.took_s, self.digest, self.has_work = counting_engine(Limits(4, 8, 1)).load, 0.0, None, True
        self.spares_s = [30.0, 30.0]
        self.came, self.stepped = [], threading.Event()

    @property
    def spare_s(self):
        return self.spares_s.pop() if self.spares_s else 0.0

    def submit(self, asked):
        self.came.append(asked.request_id)

    def step(self, now, took_s):
        self.has_work, self.came = False, tuple(self.came)
        self.stepped.set()
        return StepNews()

    def fail_all(self, error):
        return ()


def test_whoever_comes_while_the_device_is_busy_is_in_the_next_step():
    loop = EngineThread(engine := Busy(), lambda: 0)
    loop.start(lambda _: None)
    loop.submit(request("first", [1]))
    loop.submit(request("second", [1]))
    assert engine.stepped.wait(20)
    loop.stop()
    assert engine.came == ("first", "second")


def test_stopping_waits_for_no_newcomers():
    loop = EngineThread(engine := Busy(), lambda: 0)
    loop.start(lambda _: None)
    loop.stop()
    assert not engine.stepped.is_set() and engine.spares_s == [30.0]


def test_a_refused_request_ends_with_its_error(started):
    loop, listener = started(tiny_engine(max_waiting=0))
    loop.submit(request("a", [1]))
    listener.wait(lambda: "a" in listener.ended)
    assert listener.ended["a"].finish_reason is FinishReason.ERROR
    assert isinstance(listener.ended["a"].error, Overloaded)


def test_stop_ends_what_is_left(started):
    loop, listener = started(tiny_engine())
    for i in range(8):
        loop.submit(request(i, [1, 2], LONG))
    listener.wait(lambda: listener.steps)
    loop.stop()
    assert len(listener.ended) == 8


def fail_steps(monkeypatch, engine, count):
    """The next `count` dispatches take the donated arrays with them and raise."""
    programs, left = engine._programs, [count]
    run = programs.run

    def broken(*arguments):
        if not left[0]:
            return run(*arguments)
        left[0] -= 1
        for leaf in jax.tree.leaves((programs._cache, programs._last_token_B, programs._slots)):
            leaf.delete()
        raise RuntimeError("device lost")

    monkeypatch.setattr(programs, "run", broken)


def test_a_failing_step_fails_its_requests_once_and_the_engine_goes_on(started, monkeypatch, tmp_path, caplog):
    engine = tiny_engine()
    loop, listener = started(engine)
    loop.submit(request("before", [1, 2, 3]))
    listener.wait(lambda: "before" in listener.ended)
    for i in range(4):
        loop.submit(request(i, [i, 2, 3], LONG))
    listener.wait(lambda: len(listener.tokens) == 5)
    fail_steps(monkeypatch, engine, 1)
    listener.wait(lambda: len(listener.ended) == 5)
    for i in range(4):
        assert isinstance(listener.ended[str(i)].error, EngineFailed)
        assert "RuntimeError: device lost" in str(listener.ended[str(i)].error)
    assert loop.state is EngineState.READY
    loop.submit(request("after", [1, 2, 3]))
    listener.wait(lambda: "after" in listener.ended)
    assert listener.tokens["after"] == listener.tokens["before"]
    assert listener.ended["after"].cached_tokens == 0
    stats = listener.steps[-1].stats
    assert (stats.num_failed_steps, stats.num_compiles_after_ready) == (1, 0)
    (dump,) = tmp_path.glob("steps-*.jsonl")
    assert f"is in {dump}" in caplog.text
    steps = [json.loads(line) for line in dump.read_text().splitlines()]
    assert (steps[0]["admitted"], steps[0]["num_prefill"], steps[0]["prefill_tokens"]) == (["before"], 1, 3)


def test_requests_that_wait_survive_a_failing_step(monkeypatch):
    engine = tiny_engine()
    for i in range(6):
        engine.submit(request(i, [i, 2, 3]))
    for _ in range(6):
        engine.step()
    fail_steps(monkeypatch, engine, 1)
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    ended = engine.recover(EngineFailed("test"))
    engine.check_integrity()
    assert {output.request_id for output in ended} == {"0", "1", "2", "3"}
    assert engine.load.free_pages == engine.load.total_pages and engine.load.num_waiting == 2
    told = {"4": [], "5": []}
    while engine.has_work:
        for output in engine.step():
            told[output.request_id] += output.token_ids
    assert told == {name: run(tiny_engine(), [request(name, [int(name), 2, 3])])[name][0] for name in told}


def test_a_step_that_fails_while_it_hands_out_tokens_loses_no_end(started, monkeypatch):
    """One request's end is known already when the next one's token raises."""
    engine = tiny_engine()
    loop, listener = started(engine)
    commit_odd = commit._commit_odd

    def broken(sequence, *arguments):
        if sequence.request_id == "second":
            raise MemoryError("host is full")
        return commit_odd(sequence, *arguments)

    monkeypatch.setattr(commit, "_commit_odd", broken)
    short = SamplingParams(temperature=0.0, max_tokens=2)
    loop.submit(request("first", [1, 2, 3], short))
    loop.submit(request("second", [1, 2, 3], short))
    listener.wait(lambda: len(listener.ended) == 2)
    assert listener.ended["first"].finish_reason is FinishReason.LENGTH
    assert len(listener.tokens["first"]) == 2
    assert "MemoryError: host is full" in str(listener.ended["second"].error)


def test_failures_without_a_token_in_between_end_the_engine(started, monkeypatch):
    engine = tiny_engine()
    loop, listener = started(engine)
    fail_steps(monkeypatch, engine, MAX_FAILURES - 1)
    for name in ("a", "b", "c"):
        loop.submit(request(name, [1, 2, 3]))
        listener.wait(lambda name=name: name in listener.ended)
    assert listener.ended["c"].finish_reason is FinishReason.LENGTH
    fail_steps(monkeypatch, engine, MAX_FAILURES)
    for name in ("d", "e", "f", "g"):
        loop.submit(request(name, [1, 2, 3]))
        listener.wait(lambda name=name: name in listener.ended)
    assert all(isinstance(listener.ended[name].error, EngineFailed) for name in "defg")
    assert loop.state is EngineState.FAILED
    engine._programs.reset()  # shared by all tests


def test_a_device_that_cannot_be_set_up_anew_ends_the_engine(started, monkeypatch, caplog):
    engine = tiny_engine()
    loop, listener = started(engine)
    with monkeypatch.context() as patch:
        fail_steps(patch, engine, 1)
        patch.setattr(engine._programs, "reset", None)
        for i in range(6):
            loop.submit(request(i, [1, 2, 3]))
        listener.wait(lambda: len(listener.ended) == 6)
    assert loop.state is EngineState.FAILED
    assert "cannot be set up anew" in caplog.text
    engine._programs.reset()  # shared by all tests


def test_a_request_that_cannot_be_queued_fails_alone(started):
    loop, listener = started(tiny_engine())
    loop.submit(request("odd", [1, 2], sampling=None))
    loop.submit(request("even", [1, 2]))
    listener.wait(lambda: len(listener.ended) == 2)
    assert isinstance(listener.ended["odd"].error, EngineFailed)
    assert listener.ended["even"].finish_reason is FinishReason.LENGTH


def test_a_dispatch_that_fails_is_the_last_step_of_the_dump(started, monkeypatch, tmp_path):
    engine = tiny_engine()
    loop, listener = started(engine)
    loop.submit(request("a", [1, 2, 3], LONG))
    listener.wait(lambda: listener.tokens.get("a"))
    monkeypatch.setattr(engine._programs, "run", None)
    listener.wait(lambda: "a" in listener.ended)
    (dump,) = tmp_path.glob("steps-*.jsonl")
    before, last = [json.loads(line) for line in dump.read_text().splitlines()][-2:]
    assert before["host_s"] > 0 and before["device_wait_s"] is not None
    assert last["host_s"] is None


def test_a_dump_that_cannot_be_written_hides_nothing(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    engine = tiny_engine()
    loop, listener = EngineThread(engine, lambda: 0, tmp_path / "file"), Listener()
    monkeypatch.setattr(engine, "step", None)
    loop.start(listener)
    loop.submit(request("a", [1, 2, 3]))
    listener.wait(lambda: "a" in listener.ended)
    loop.stop()
    assert "cannot be written" in caplog.text
    assert listener.ended["a"].finish_reason is FinishReason.ERROR


def test_a_thread_that_crashes_is_seen_from_outside(tmp_path, caplog):
    loop = EngineThread(tiny_engine(), lambda: 0, tmp_path)
    loop.start(lambda _: 1 / 0)
    loop.submit(request("a", [1, 2, 3]))
    loop._thread.join(30)
    assert loop.state is EngineState.FAILED
    assert "ZeroDivisionError" in caplog.text
    assert list(tmp_path.glob("steps-*.jsonl"))
    loop.stop()


def test_the_time_of_steps_is_split(started):
    loop, listener = started(tiny_engine())
    before = time.perf_counter()
    loop.submit(request("a", [1, 2, 3], LONG))
    listener.wait(lambda: "a" in listener.ended)
    stats = listener.steps[-1].stats
    assert stats.step_host_s > 0 and stats.step_device_wait_s > 0
    assert stats.step_host_s + stats.step_device_wait_s < time.perf_counter() - before


def test_an_idle_engine_sleeps(started):
    loop, listener = started(tiny_engine())
    loop.submit(request("a", [1]))
    listener.wait(lambda: "a" in listener.ended)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.15, "an idle engine burns CPU"


def test_a_trace_names_the_steps(started, tmp_path):
    loop, listener = started(tiny_engine())
    loop.start_trace(str(tmp_path / "trace"))
    loop.submit(request("a", [1, 2, 3]))
    listener.wait(lambda: "a" in listener.ended)
    loop.stop_trace()
    (path,) = (tmp_path / "trace").rglob("*.xplane.pb")
    events = {
        e.name
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        for line in plane.lines
        for e in line.events
    }
    assert "engine step" in events
    with pytest.raises(InvalidRequest, match="cannot be written"):
        loop.stop_trace()


def test_a_storm_of_aborts_from_many_threads(started):
    """Each request ends once, whoever was quicker; steps go on meanwhile."""
    loop, listener = started(counting_engine(Limits(PAGE_SIZE, TILE_TOKENS, 2), max_waiting=2_000))

    def storm(part):
        names = [f"{part}/{i}" for i in range(300)]
        for i, name in enumerate(names):
            loop.submit(request(name, [1] * (1 + i % 40), SamplingParams(max_tokens=1 + i % 30)))
            if i % 10:
                loop.abort(names[i - i % 7])
                loop.abort(name)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(storm, range(4)))
    listener.wait(lambda: len(listener.ended) == 1_200)
    reasons = Counter(output.finish_reason for output in listener.ended.values())
    assert reasons[FinishReason.ABORT] > 900 and not reasons[FinishReason.ERROR]
