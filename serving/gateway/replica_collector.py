"""ReplicaCollector: the replica's own figures on the gateway's /metrics, as the replica last reported them."""

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from serving.engine.api import STEP_TOKENS, StepStats
from serving.metrics import ENGINE, LABELS
from serving.replica.status import ReplicaStatus
from serving.request import Load

AWAKE = "awake"
SLEEP_STATES = (AWAKE, "weights_offloaded", "discard_all")
NEVER = (
    "vllm:mm_cache_queries",
    "vllm:mm_cache_hits",
)
"""Names that dashboards ask for."""


class ReplicaCollector(Collector):
    """Its counters start anew when the replica does, as Prometheus expects."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._up = False
        self._status = ReplicaStatus()

    def update(self, status: ReplicaStatus, *, up: bool) -> None:
        self._status, self._up = status, up

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("podstream:replica_up", "1 while a token can be made.")
        up.add_metric([], float(self._up))
        yield up
        info = GaugeMetricFamily("podstream:replica_info", "Where the replica listens.", labels=["address"])
        info.add_metric([self._address], 1.0)
        yield info
        if self._status.model:
            yield from self._gauges(self._status.load)
            yield from self._counters(self._status.stats)
        if self._status.max_adapters:
            yield self._adapters()

    def _gauges(self, load: Load) -> Iterator[Metric]:
        used = 1 - load.free_pages / load.total_pages if load.total_pages else 0.0
        yield self._gauge("vllm:num_requests_running", "Requests in the decode batch.", load.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for a slot.", load.num_waiting)
        waiting = "vllm:num_requests_waiting_by_reason"
        by_reason = GaugeMetricFamily(waiting, "Requests that wait, by reason.", labels=[*LABELS, "reason"])
        by_reason.add_metric([self._status.model, ENGINE, "capacity"], load.num_waiting)
        yield by_reason
        yield self._gauge("podstream:slots", "Requests that can be in the decode batch.", load.total_slots)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", used)
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Shape of the KV cache.",
            labels=[*LABELS, "block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"],
        )
        size = load.page_size * load.total_pages
        longest = size / max(1, self._status.max_seq_len)
        shape = (load.page_size, load.total_pages, size, f"{longest:.2f}")
        info.add_metric([self._status.model, ENGINE, *map(str, shape)], 1.0)
        yield info
        states = GaugeMetricFamily("vllm:engine_sleep_state", "Always awake.", labels=[*LABELS, "sleep_state"])
        for state in SLEEP_STATES:
            states.add_metric([self._status.model, ENGINE, state], float(state == AWAKE))
        yield states

    def _counters(self, stats: StepStats) -> Iterator[Metric]:
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of requests that got an answer.", stats.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens)
        queries, hits, back = stats.prefix_cache_queries, stats.prefix_cache_hits, stats.host_cache_hits
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", queries)
        cached = "Prompt tokens that were not computed again."
        yield self._counter("vllm:prompt_tokens_cached", cached, hits)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found there, on the device.", hits - back)
        looked_up = "Prompt tokens that were not, and were looked up in the host's memory."
        yield self._counter("vllm:external_prefix_cache_queries", looked_up, stats.host_cache_queries)
        yield self._counter("vllm:external_prefix_cache_hits", "Prompt tokens found in the host's memory.", back)
        pages = "KV pages that the host's memory holds for the prefix cache."
        yield self._gauge("podstream:host_pages", pages, stats.num_host_pages)
        yield self._by_source(stats.prompt_tokens - hits, hits - back, back)
        for name in NEVER:
            yield self._counter(name, "Always 0: there is no such cache here.", 0)
        yield self._counter("podstream:prefill_tokens", "Tokens computed in prefill.", stats.prefill_tokens)
        yield self._counter("vllm:num_preemptions", "Requests put back to wait.", stats.num_preemptions)
        drafts, tokens = "Guesses of next tokens that were checked.", "Tokens that were guessed."
        yield self._counter("vllm:spec_decode_num_drafts", drafts, stats.num_drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", tokens, stats.num_draft_tokens)
        accepted = "Guessed tokens that came true."
        yield self._counter("vllm:spec_decode_num_accepted_tokens", accepted, stats.num_accepted_tokens)
        yield self._by_place(stats.accepted_at)
        yield self._counter("podstream:steps", "Engine steps.", stats.num_steps)
        if stats.step_tokens:
            yield self._step_tokens(stats)
        failed = "Steps that failed; after some in a row the replica is restarted."
        yield self._counter("podstream:failed_steps", failed, stats.num_failed_steps)
        host = "Time of the engine's thread in steps, without waiting for the device."
        yield self._counter("podstream:step_host_seconds", host, stats.step_host_s)
        wait = "Time that the engine's thread waited for the device."
        yield self._counter("podstream:step_device_wait_seconds", wait, stats.step_device_wait_s)
        yield self._counter(
            "podstream:compiles_after_ready", "Compilations in service; must stay 0.", stats.num_compiles_after_ready
        )

    def _adapters(self) -> Metric:
        """As vLLM has it, and routers read it: the names are labels, the time of the news is the value."""
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "When this was so: adapters that answers are written with, and that requests wait for.",
            labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
        )
        running = ",".join(adapter.name for adapter in self._status.adapters if adapter.num_running)
        waiting = ",".join(adapter.name for adapter in self._status.adapters if adapter.num_waiting)
        family.add_metric([str(self._status.max_adapters), waiting, running], time.time())
        return family

    def _by_source(self, computed: int, cached: int, back: int) -> Metric:
        name, text = "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from."
        family = CounterMetricFamily(name, text, labels=[*LABELS, "source"])
        told = {"local_compute": max(0, computed), "local_cache_hit": cached, "external_kv_transfer": back}
        for source, count in told.items():
            family.add_metric([self._status.model, ENGINE, source], count)
        return family

    def _by_place(self, accepted_at: Sequence[int]) -> Metric:
        name, text = "vllm:spec_decode_num_accepted_tokens_per_pos", "Guessed tokens that came true, by their place."
        family = CounterMetricFamily(name, text, labels=[*LABELS, "position"])
        for place, count in enumerate(accepted_at):
            family.add_metric([self._status.model, ENGINE, str(place)], count)
        return family

    def _step_tokens(self, stats: StepStats) -> Metric:
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens that a step computes.", labels=LABELS)
        bounds = [*map(floatToGoString, STEP_TOKENS), "+Inf"]
        buckets = [(bound, float(count)) for bound, count in zip(bounds, accumulate(stats.step_tokens), strict=True)]
        family.add_metric([self._status.model, ENGINE], buckets, float(stats.sum_step_tokens))
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric([self._status.model, ENGINE], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric([self._status.model, ENGINE], value)
        return family
