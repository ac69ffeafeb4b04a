"""How long steps take: means by size, and a time of which a step hardly ever falls short."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.engine.plan import Limits
from serving.engine.step_clock import StepClock
from serving.engine.trip_times import TripTimes
from serving.request import SamplingParams
from tests.engines import PAGE_SIZE, TILE_TOKENS, CountingPrograms, counting_engine, request


def test_times_are_known_by_size_after_the_first_run_and_a_larger_step_corrects_a_smaller_one():
    times = TripTimes()
    for num_rows, num_tiles, seconds in (
        (4, 0, 9.0),
        (4, 0, 1.0),
        (8, 1, 9.0),
        (8, 1, 3.0),
        (16, 3, 9.0),
        (16, 3, 2.0),
    ):
        times.note(num_rows, seconds, 1, num_tiles)
    assert times.of_step(3, 0) == 1.0 and times.of_step(3, 1) is times.of_step(5, 0) is None
    assert times.at_most(5, 1) == 2.0, "a step with four times the work took less"
    assert times.at_most(12, 4) == 2.0 and times.at_most(17, 0) == 0.0


def test_a_step_that_was_held_up_says_nothing_about_the_least_and_a_shorter_one_says_all():
    times = TripTimes()
    assert times.at_least(4, 0) == 0.0, "nobody knows"
    for seconds in (9.0, *[1.0] * 30):
        times.note(4, seconds, 1)
    assert times.at_least(3, 0) == pytest.approx(0.8)
    times.note(4, 60.0, 1)
    assert times.at_least(4, 0) < 0.9
    times.note(4, 0.5, 1)
    assert times.at_least(4, 0) == pytest.approx(0.4) and times.at_least(5, 0) == times.at_least(4, 1) == 0.0


class Device(CountingPrograms):
    """Runs one call after the other, each as long as the next of `calls_s` says, in seconds of its own clock, which
    moves as somebody waits."""

    def __init__(self, calls_s, *sizes):
        super().__init__(*sizes)
        self.calls_s = iter(calls_s)
        self.now_s = self.free_s = self.idle_s = 0.0

    def run(self, *arguments):
        tokens_RI, logprobs = super().run(*arguments)
        self.idle_s += max(0.0, self.now_s - self.free_s)
        self.free_s = max(self.now_s, self.free_s) + next(self.calls_s)
        return Coming(tokens_RI, self, self.free_s), logprobs


class Coming:
    def __init__(self, tokens_RI, device, ready_s):
        self.tokens_RI, self.device, self.ready_s = tokens_RI, device, ready_s

    def __array__(self, dtype=None, copy=None):
        self.device.now_s = max(self.device.now_s, self.ready_s)
        return self.tokens_RI


@given(st.lists(st.floats(1.0, 1.2), min_size=60, max_size=60), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_a_step_that_waits_for_newcomers_leaves_the_device_no_pause(calls_s, num_trips):
    """The times differ by a fifth at most. In the end, at least half of each is waited."""
    device = Device(calls_s, 4, 2, num_trips)
    limits = Limits(PAGE_SIZE, TILE_TOKENS, 2, max_trips=num_trips, max_call_s=10.0)
    engine = counting_engine(limits, trip_s=None, make=lambda *_: device)
    engine._clock = engine._times._clock = StepClock(lambda: device.now_s)
    engine.submit(request("a", [1, 2, 3], SamplingParams(max_tokens=40)))
    waited = []
    while engine.has_work:
        waited.append(engine.spare_s)
        device.now_s += waited[-1]
        engine.step()
    assert device.idle_s == 0.0
    assert num_trips > 1 or (min(waited[-10:-2]) >= 0.5 and waited[0] == 0.0)
