"""Every metric of the gateway's /metrics: its name, unit, labels and buckets.

Names, labels and buckets are vLLM's where it has them, so that dashboards and autoscalers plug in; ours: `podstream:`.
What the gateway sees (latencies, requests) is observed here; what the replica knows rides in with its status.
"""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.engine.api import StepStats
from serving.request import FinishReason, Load, Usage

LABELS = ("model_name", "engine")
ENGINE = "0"
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
          2560)  # fmt: skip
ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
E2E_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class Metrics:
    """Owns the metric objects of one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.replica = ReplicaCollector()
        self._of_model: dict[str, ModelMetrics] = {}
        registry.register(self.replica)
        self._ttft = self._histogram("time_to_first_token_seconds", "From the request to its first token.", TTFT_S)
        self._itl = self._histogram("inter_token_latency_seconds", "Time between two tokens of an answer.", ITL_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From the request to its end.", E2E_S)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a finished request.", TOKENS)
        self._generation = self._histogram("request_generation_tokens", "Tokens of a finished answer.", TOKENS)
        self._finished = Counter(
            "vllm:request_success", "Requests that ended, by reason.", (*LABELS, "finished_reason"), registry=registry
        )

    def of_model(self, model: str) -> "ModelMetrics":
        """The metrics of one model, with their labels looked up once."""
        if model not in self._of_model:
            self._of_model[model] = self._with_labels(model, ENGINE)
        return self._of_model[model]

    def _with_labels(self, *labels: str) -> "ModelMetrics":
        return ModelMetrics(
            self._ttft.labels(*labels),
            self._itl.labels(*labels),
            self._e2e.labels(*labels),
            self._prompt.labels(*labels),
            self._generation.labels(*labels),
            {reason: self._finished.labels(*labels, reason.value) for reason in FinishReason},
        )

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)


class ModelMetrics:
    """What is observed of one model's requests."""

    def __init__(
        self,
        ttft: Histogram,
        itl: Histogram,
        e2e: Histogram,
        prompt: Histogram,
        generation: Histogram,
        finished: dict[FinishReason, Counter],
    ) -> None:
        self._ttft, self._itl, self._e2e = ttft, itl, e2e
        self._prompt, self._generation = prompt, generation
        self._finished = finished

    def first_token(self, after_s: float) -> None:
        self._ttft.observe(after_s)

    def next_tokens(self, gap_s: float, num_tokens: int) -> None:
        """Tokens that arrive together share their gap evenly."""
        for _ in range(num_tokens):
            self._itl.observe(gap_s / num_tokens)

    def finish(self, reason: FinishReason, after_s: float, usage: Usage | None) -> None:
        """`usage` is None for a request that ended without being counted."""
        self._finished[reason].inc()
        self._e2e.observe(after_s)
        if usage is not None:
            self._prompt.observe(usage.prompt_tokens)
            self._generation.observe(usage.completion_tokens)


class ReplicaCollector(Collector):
    """The replica's own figures, as last reported; its counters start anew when it does, as Prometheus expects."""

    def __init__(self) -> None:
        self._up = False
        self._model = ""
        self._load = Load()
        self._stats = StepStats()

    def update(self, *, up: bool, model: str, load: Load, stats: StepStats) -> None:
        self._up, self._model, self._load, self._stats = up, model, load, stats

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("podstream:replica_up", "1 while a token can be made.")
        up.add_metric([], float(self._up))
        yield up
        if self._model:
            yield from self._gauges(self._load)
            yield from self._counters(self._stats)

    def _gauges(self, load: Load) -> Iterator[Metric]:
        used = 1 - load.free_pages / load.total_pages if load.total_pages else 0.0
        yield self._gauge("vllm:num_requests_running", "Requests in the decode batch.", load.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for a slot.", load.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", used)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Shape of the KV cache.", labels=[*LABELS, "block_size", "num_gpu_blocks"]
        )
        info.add_metric([self._model, ENGINE, str(load.page_size), str(load.total_pages)], 1.0)
        yield info

    def _counters(self, stats: StepStats) -> Iterator[Metric]:
        yield self._counter("vllm:prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens)
        yield self._counter("vllm:num_preemptions", "Requests put back to wait.", stats.num_preemptions)
        yield self._counter("podstream:steps", "Engine steps.", stats.num_steps)
        yield self._counter(
            "podstream:compiles_after_ready", "Compilations in service; must stay 0.", stats.num_compiles_after_ready
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric([self._model, ENGINE], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric([self._model, ENGINE], value)
        return family
