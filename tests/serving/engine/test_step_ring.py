"""What a crash leaves behind, and where the time of a step went."""

import json

from serving.engine.step_clock import StepClock
from serving.engine.step_ring import MAX_FILES, StepRecord, StepRing


def record(number, **changes):
    return StepRecord(number, 0.0, "decode 4 rows", 3, 0, 0, 3, 1, 90, **changes)


def test_only_the_newest_steps_are_kept():
    ring = StepRing(4)
    for number in range(10):
        ring.add(record(number))
        ring.end(0.5, 0.25)
    assert [r.number for r in ring.records] == [6, 7, 8, 9]
    assert {(r.host_s, r.device_wait_s) for r in ring.records} == {(0.5, 0.25)}


def test_a_call_without_a_step_changes_nothing():
    ring = StepRing()
    ring.end(1.0, 1.0)
    ring.add(record(0))
    ring.end(0.5, 0.25)
    ring.end(9.0, 9.0)
    assert [(r.host_s, r.device_wait_s) for r in ring.records] == [(0.5, 0.25)]


def test_a_dump_reads_back_and_shows_the_step_that_did_not_end(tmp_path):
    ring = StepRing()
    ring.add(record(0, admitted=("a", "b"), preempted=("c",)))
    ring.end(0.5, 0.25)
    ring.add(record(1))
    path = ring.dump(tmp_path / "new" / "folder")
    first, last = map(json.loads, path.read_text().splitlines())
    assert (first["admitted"], first["preempted"], first["host_s"]) == (["a", "b"], ["c"], 0.5)
    assert (last["number"], last["host_s"], last["device_wait_s"]) == (1, None, None)


def test_dumps_do_not_pile_up(tmp_path):
    other = tmp_path / "notes.txt"
    other.write_text("stays")
    paths = [StepRing().dump(tmp_path) for _ in range(MAX_FILES + 3)]
    assert sorted(tmp_path.glob("steps-*")) == paths[3:]
    assert other.exists()


def test_time_is_split_between_host_and_waiting():
    times = iter([10.0, 11.0, 14.0, 16.0, 20.0, 20.5])
    clock = StepClock(lambda: next(times))
    clock.start_step()
    assert clock.wait_for(lambda: "tokens") == "tokens"
    assert clock.end_step() == (3.0, 3.0)
    clock.start_step()
    assert clock.end_step() == (0.5, 0.0)
    assert (clock.host_s, clock.device_wait_s) == (3.5, 3.0)
