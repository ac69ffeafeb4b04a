import pytest
from prometheus_client import CollectorRegistry

from serving.metrics import TOKENS, Metrics
from serving.request import FinishReason, Usage

LABELS = {"model_name": "m", "engine": "0"}


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def metrics(registry):
    return Metrics(registry).of_model("m")


def test_tokens_that_come_together_share_their_gap(registry, metrics):
    metrics.next_tokens(0.3, 3)
    assert registry.get_sample_value("vllm:inter_token_latency_seconds_count", LABELS) == 3
    assert registry.get_sample_value("vllm:inter_token_latency_seconds_sum", LABELS) == pytest.approx(0.3)


def test_a_finished_request_is_counted_with_its_tokens(registry, metrics):
    metrics.finish(FinishReason.STOP, 1.5, Usage(10, 20))
    assert registry.get_sample_value("vllm:request_success_total", {**LABELS, "finished_reason": "stop"}) == 1
    assert registry.get_sample_value("vllm:request_prompt_tokens_sum", LABELS) == 10
    assert registry.get_sample_value("vllm:request_generation_tokens_sum", LABELS) == 20


def test_a_failed_request_has_no_tokens(registry, metrics):
    metrics.finish(FinishReason.ERROR, 1.5, None)
    assert registry.get_sample_value("vllm:request_success_total", {**LABELS, "finished_reason": "error"}) == 1
    assert registry.get_sample_value("vllm:request_prompt_tokens_count", LABELS) == 0


def test_registries_do_not_share_anything(registry, metrics):
    Metrics(CollectorRegistry()).of_model("m").first_token(1.0)
    assert registry.get_sample_value("vllm:time_to_first_token_seconds_count", LABELS) == 0


def test_token_buckets_are_a_1_2_5_series():
    assert TOKENS[:6] == (1, 2, 5, 10, 20, 50)
