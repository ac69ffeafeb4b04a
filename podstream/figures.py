"""Figures: what `podstream top` shows, computed from two scrapes. A figure that cannot be known is None, never 0."""

from dataclasses import dataclass

from podstream.scrape import Buckets, Scrape, quantile


@dataclass(frozen=True, slots=True)
class Figures:
    """Rates and latencies are those of the time between two scrapes."""

    models: tuple[str, ...]
    up: bool | None
    slots_used: float | None
    slots_total: float | None
    waiting: float | None
    pages_used: float | None
    pages_total: float | None
    page_size: int
    generated_per_s: float | None
    prompt_per_s: float | None
    prefilled_per_s: float | None
    cache_hit_share: float | None
    finished_per_s: float | None
    preempted: float | None
    """Since the replica started."""
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    itl_p50_s: float | None
    itl_p95_s: float | None
    steps_per_s: float | None
    host_s: float | None
    """Host time of one step, mean."""
    device_wait_s: float | None
    """Time of one step spent waiting for the device, mean."""

    @property
    def host_share(self) -> float | None:
        """Of a step's time, 0 to 1."""
        if self.host_s is None or self.device_wait_s is None or self.host_s + self.device_wait_s <= 0:
            return None
        return self.host_s / (self.host_s + self.device_wait_s)


def figures(old: Scrape, new: Scrape) -> Figures:
    """A counter that went back was started anew: its new value is what was added."""
    usage = new.value("vllm:kv_cache_usage_perc")
    ttft, itl = (_since(old, new, f"vllm:{name}_seconds") for name in ("time_to_first_token", "inter_token_latency"))
    up = new.value("podstream:replica_up")
    return Figures(
        models=new.models,
        up=None if up is None else up > 0,
        slots_used=new.value("vllm:num_requests_running"),
        slots_total=new.value("podstream:slots"),
        waiting=new.value("vllm:num_requests_waiting"),
        pages_used=None if usage is None else round(usage * new.num_pages),
        pages_total=new.num_pages or None,
        page_size=new.page_size,
        generated_per_s=_rate(old, new, "vllm:generation_tokens_total"),
        prompt_per_s=_rate(old, new, "vllm:prompt_tokens_total"),
        prefilled_per_s=_rate(old, new, "podstream:prefill_tokens_total"),
        cache_hit_share=_ratio(old, new, "vllm:prompt_tokens_cached_total", "vllm:prefix_cache_queries_total"),
        finished_per_s=_rate(old, new, "vllm:request_success_total"),
        preempted=new.value("vllm:num_preemptions_total"),
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p95_s=quantile(ttft, 0.95),
        itl_p50_s=quantile(itl, 0.5),
        itl_p95_s=quantile(itl, 0.95),
        steps_per_s=_rate(old, new, "podstream:steps_total"),
        host_s=_ratio(old, new, "podstream:step_host_seconds_total", "podstream:steps_total"),
        device_wait_s=_ratio(old, new, "podstream:step_device_wait_seconds_total", "podstream:steps_total"),
    )


def _added(old: Scrape, new: Scrape, name: str) -> float | None:
    after = new.value(name)
    if after is None:
        return None
    before = old.values.get(name, 0.0)
    return after - before if after >= before else after


def _rate(old: Scrape, new: Scrape, name: str) -> float | None:
    added, seconds = _added(old, new, name), new.at_s - old.at_s
    return None if added is None or seconds <= 0 else added / seconds


def _ratio(old: Scrape, new: Scrape, part: str, whole: str) -> float | None:
    numerator, denominator = _added(old, new, part), _added(old, new, whole)
    return None if numerator is None or not denominator else numerator / denominator


def _since(old: Scrape, new: Scrape, name: str) -> Buckets:
    """Observations between the two scrapes."""
    before, after = dict(old.histograms.get(name, ())), new.histograms.get(name, ())
    added = tuple((bound, count - before.get(bound, 0.0)) for bound, count in after)
    return added if all(count >= 0 for _, count in added) else after
