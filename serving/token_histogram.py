"""TokenHistogram: a histogram for what is observed with every token, in a fraction of the client library's time, which
takes a lock and looks at bucket after bucket. One thread observes."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Series:
    """Of one set of labels."""

    __slots__ = ("_buckets", "counts", "total")

    def __init__(self, buckets: Sequence[float]) -> None:
        self._buckets = tuple(buckets)
        self.counts = [0] * (len(buckets) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self._buckets, value)] += times
        self.total += value * times


class TokenHistogram(Collector):
    def __init__(
        self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._labels, self._buckets = name, text, labels, buckets
        self._series: dict[tuple[str, ...], Series] = {}
        registry.register(self)

    def labels(self, *values: str) -> Series:
        return self._series.setdefault(values, Series(self._buckets))

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [*map(floatToGoString, self._buckets), "+Inf"]
        for values, series in self._series.items():
            counts = zip(bounds, accumulate(series.counts), strict=True)
            family.add_metric(values, [(bound, float(count)) for bound, count in counts], series.total)
        yield family
