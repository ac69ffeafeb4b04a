"""The benchmark of the host's time runs, and grows with what it measures."""

from tests.bench.host import host_microseconds_per_step


def test_it_measures_steps_that_decode():
    assert 0 < host_microseconds_per_step(2, num_steps=9) < host_microseconds_per_step(512, num_steps=9)
