"""What a crash leaves behind, where the time of a step went, and how long a trip takes."""

import json
import math

from serving.engine.step_clock import StepClock
from serving.engine.step_ring import MAX_FILES, StepRecord, StepRing
from serving.engine.trip_times import TripTimes


def record(number, **changes):
    return StepRecord(number, 0.0, "decode 4 rows", 3, 1, 0, 0, 3, 1, 90, **changes)


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


def test_a_call_has_the_device_from_its_dispatch_or_from_the_end_of_the_call_before():
    times = iter([13.0, 14.5, 20.0])
    clock = StepClock(lambda: next(times))
    assert [clock.end_call(dispatched_s) for dispatched_s in (11.0, 12.0, 18.0)] == [2.0, 1.5, 2.0]


def test_the_time_of_a_trip_is_known_by_number_of_rows_and_follows_slowly():
    times = TripTimes()
    times.note(3, call_s=99.0, num_trips=1)
    assert times.estimate(4) == math.inf, "the first run of a program says nothing"
    times.note(3, call_s=0.4, num_trips=4)
    assert times.estimate(4) == 0.1 and times.estimate(5) == times.estimate(2) == math.inf
    times.note(4, call_s=0.5, num_trips=1)
    times.note(4, call_s=9.0, num_trips=0)
    assert times.estimate(3) == 0.2
    assert TripTimes(0.5).estimate(99) == 0.5
