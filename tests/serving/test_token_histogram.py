"""The quick histogram tells what the client library's would."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from serving.token_histogram import TokenHistogram

BUCKETS = (0.01, 0.5, 1, 2.5)


def page(registry):
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if "_created" not in line)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.0078125, 0.5, 1.0, 2.0, 2.5, 96.0]), st.integers(1, 4))))
def test_it_is_equal_to_the_librarys(observed):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    quick = TokenHistogram("x:gaps", "Gaps.", ("model",), BUCKETS, ours).labels("m")
    slow = Histogram("x:gaps", "Gaps.", ("model",), buckets=BUCKETS, registry=theirs).labels("m")
    for value, times in observed:
        quick.observe(value, times)
        for _ in range(times):
            slow.observe(value)
    assert page(ours) == page(theirs)
