import time

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from serving.metrics import TOKENS, Metrics
from serving.request import FinishReason, Usage

LABELS = {"model_name": "m", "engine": "0"}


@pytest.fixture
def all_metrics():
    return Metrics(CollectorRegistry())


@pytest.fixture
def metrics(all_metrics):
    return all_metrics.of_model("m")


@pytest.fixture
def told(all_metrics):
    """A value on the page, by name and labels."""

    def read(name, **labels):
        families = text_string_to_metric_families(all_metrics.render().decode())
        wanted = {**LABELS, **labels}
        (value,) = [s.value for f in families for s in f.samples if s.name == name and s.labels == wanted]
        return value

    return read


def test_tokens_that_come_together_share_their_gap(told, metrics):
    metrics.next_tokens(0.3, 3)
    assert told("vllm:inter_token_latency_seconds_count") == 3
    assert told("vllm:inter_token_latency_seconds_sum") == pytest.approx(0.3)


def test_a_finished_request_is_counted_with_its_tokens(told, metrics):
    metrics.finish(FinishReason.STOP, 1.5, Usage(10, 20))
    assert told("vllm:request_success_total", finished_reason="stop") == 1
    assert told("vllm:request_prompt_tokens_sum") == 10
    assert told("vllm:request_generation_tokens_sum") == 20


def test_a_failed_request_has_no_tokens(told, metrics):
    metrics.finish(FinishReason.ERROR, 1.5, None)
    assert told("vllm:request_success_total", finished_reason="error") == 1
    assert told("vllm:request_prompt_tokens_count") == 0


def test_registries_do_not_share_anything(told, metrics):
    Metrics(CollectorRegistry()).of_model("m").first_token(1.0)
    assert told("vllm:time_to_first_token_seconds_count") == 0


def test_a_page_takes_less_than_5_ms(all_metrics, metrics):
    """All streams wait for it."""
    metrics.finish(FinishReason.STOP, 1.5, Usage(10, 20))

    def took():
        started = time.thread_time()
        all_metrics.render()
        return time.thread_time() - started

    assert min(took() for _ in range(5)) < 0.005


def test_token_buckets_are_a_1_2_5_series():
    assert TOKENS[:6] == (1, 2, 5, 10, 20, 50)
