"""The engine's thread: everything submitted ends exactly once, also when it is aborted, refused, stopped or failing."""

import json
import threading
import time

import jax
import pytest

from serving.engine.api import EngineState
from serving.engine.loop import EngineThread
from serving.errors import EngineFailed, InvalidRequest, Overloaded
from serving.request import FinishReason, SamplingParams
from tests.engines import request, tiny_engine

LONG = SamplingParams(temperature=0.0, max_tokens=100)


class Listener:
    """Collects steps and lets a test wait for the end of requests."""

    def __init__(self):
        self.ended, self.tokens, self.steps = {}, {}, []
        self._news = threading.Condition()

    def __call__(self, step):
        with self._news:
            self.steps.append(step)
            for output in step.outputs:
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


def test_a_failing_step_fails_its_requests_once_and_the_engine_takes_no_more(started, monkeypatch, tmp_path, caplog):
    engine = tiny_engine()
    loop, listener = started(engine)
    loop.submit(request("a", [1, 2, 3], LONG))
    listener.wait(lambda: listener.tokens.get("a"))

    def broken(now):
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine, "step", broken)
    listener.wait(lambda: "a" in listener.ended)
    assert "RuntimeError: device lost" in str(listener.ended["a"].error)
    assert loop.state is EngineState.FAILED
    loop.submit(request("b", [1]))
    listener.wait(lambda: "b" in listener.ended)
    assert isinstance(listener.ended["b"].error, EngineFailed)
    (dump,) = tmp_path.glob("steps-*.jsonl")
    assert f"is in {dump}" in caplog.text
    steps = [json.loads(line) for line in dump.read_text().splitlines()]
    assert (steps[0]["admitted"], steps[0]["num_prefill"], steps[0]["prefill_tokens"]) == (["a"], 1, 3)
    assert {(step["shape"], step["num_decode"]) for step in steps[1:]} == {("decode 1 rows", 1)}


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
