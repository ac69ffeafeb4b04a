"""Scrape: the figures of one `/metrics` page at one moment, summed over labels. Any gateway with these names does."""

from collections import defaultdict
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

Buckets = tuple[tuple[float, float], ...]
"""(upper bound, number of observations at or under it), in rising order."""


@dataclass(frozen=True, slots=True)
class Scrape:
    at_s: float
    """By a clock that never goes back."""
    values: dict[str, float] = field(default_factory=dict)
    """Counters and gauges by name."""
    histograms: dict[str, Buckets] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()
    """Addresses of the gateway's replicas."""
    num_pages: int = 0
    page_size: int = 0

    @classmethod
    def read(cls, text: str, at_s: float) -> "Scrape":
        """Raises ValueError when the text is not a page of metrics."""
        values: defaultdict[str, float] = defaultdict(float)
        buckets: defaultdict[str, defaultdict[float, float]] = defaultdict(lambda: defaultdict(float))
        models, replicas, pages, page_size = set(), set(), 0, 0
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name] += sample.value
                if name := sample.labels.get("model_name"):
                    models.add(name)
                if bound := sample.labels.get("le"):
                    buckets[family.name][float(bound)] += sample.value
                if family.name == "podstream:replica_info":
                    replicas.add(sample.labels["address"])
                if family.name == "vllm:cache_config_info":
                    pages += int(sample.labels["num_gpu_blocks"])
                    page_size = int(sample.labels["block_size"])
        histograms = {name: tuple(sorted(counts.items())) for name, counts in buckets.items()}
        return cls(at_s, dict(values), histograms, tuple(sorted(models)), tuple(sorted(replicas)), pages, page_size)

    def value(self, name: str) -> float | None:
        """None: this gateway does not tell."""
        return self.values.get(name)


def quantile(buckets: Buckets, share: float) -> float | None:
    """The value that `share` of the observations do not exceed, interpolated within its bucket; None without any."""
    total = buckets[-1][1] if buckets else 0
    if total <= 0:
        return None
    rank, low, below = share * total, 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            return low if bound == float("inf") else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low
