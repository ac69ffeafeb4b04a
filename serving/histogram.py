"""Histogram: what the client library's does, in a fraction of its time. One thread observes and renders.

Observing takes no lock and looks at few buckets, which matters with every token; a page of twenty such histograms is
written in tenths of a millisecond, which matters to all streams that wait meanwhile.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.utils import floatToGoString

ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Series:
    """Of one set of labels."""

    __slots__ = ("_bounds", "_buckets", "_count", "_sum", "counts", "total")

    def __init__(self, name: str, labels: Mapping[str, str], buckets: Sequence[float]) -> None:
        self._buckets = tuple(buckets)
        self.counts = [0] * (len(buckets) + 1)
        self.total = 0.0
        bounds = [*map(floatToGoString, buckets), "+Inf"]
        self._bounds = [f"{name}_bucket{_written({**labels, 'le': bound})} " for bound in bounds]
        self._count, self._sum = f"{name}_count{_written(labels)} ", f"{name}_sum{_written(labels)} "

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self._buckets, value)] += times
        self.total += value * times

    def lines(self) -> Iterator[str]:
        count = 0
        for bound, count in zip(self._bounds, accumulate(self.counts), strict=True):
            yield f"{bound}{count}.0\n"
        yield f"{self._count}{count}.0\n"
        total = floatToGoString(self.total)
        yield f"{self._sum}{total}\n"


class Histogram:
    def __init__(self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]) -> None:
        self._name, self._labels, self._buckets = name, labels, buckets
        self._head = f"# HELP {name} {text}\n# TYPE {name} histogram\n"
        self._series: dict[tuple[str, ...], Series] = {}

    def labels(self, *values: str) -> Series:
        if values not in self._series:
            labels = dict(zip(self._labels, values, strict=True))
            self._series[values] = Series(self._name, labels, self._buckets)
        return self._series[values]

    def render(self) -> str:
        """In the text format of Prometheus."""
        return "".join([self._head, *(line for series in self._series.values() for line in series.lines())])


def _written(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{value.translate(ESCAPED)}"' for name, value in sorted(labels.items()))
    return f"{{{pairs}}}"
