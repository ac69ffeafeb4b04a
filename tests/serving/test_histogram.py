"""The quick histogram writes what the client library's would."""

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as LibraryHistogram

from serving.histogram import Histogram

BUCKETS = (0.01, 0.5, 1, 2.5)
OBSERVED = st.lists(st.tuples(st.sampled_from([0.0, 0.0078125, 0.5, 1.0, 2.0, 2.5, 96.0]), st.integers(1, 4)))


def lines_of(text):
    return sorted(line for line in text.splitlines() if "_created" not in line)


@settings(max_examples=40)
@given(st.sampled_from(["m", 'a "name"\\\n']), OBSERVED)
def test_it_is_equal_to_the_librarys(model, observed):
    theirs, quick = CollectorRegistry(), Histogram("x:gaps", "Gaps.", ("model", "engine"), BUCKETS)
    slow = LibraryHistogram("x:gaps", "Gaps.", ("model", "engine"), buckets=BUCKETS, registry=theirs).labels(model, "0")
    for value, times in observed:
        quick.labels(model, "0").observe(value, times)
        for _ in range(times):
            slow.observe(value)
    quick.labels(model, "0")
    assert lines_of(quick.render()) == lines_of(generate_latest(theirs).decode())
