"""Traces: one trace from the HTTP request to the steps of the engine, and nothing at all where they are off."""

import sys

import pytest

from serving import tracing
from serving.errors import ConfigError
from tests.fakes import FAKE_NAME
from tests.services import running_app, running_replica

COMPLETIONS = "/v1/completions"
BODY = {"model": FAKE_NAME, "prompt": "abc", "max_tokens": 5}
PARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


@pytest.fixture
def spans():
    """Those that have ended."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter, provider = memory.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter.get_finished_spans
    tracing.use(None)


async def test_a_request_is_one_trace_down_to_the_steps(spans):
    async with running_replica() as replica, running_app(replica.address) as http:
        answer = await http.post(COMPLETIONS, json=BODY, headers={"traceparent": PARENT, "x-request-id": "r1"})
        assert answer.status_code == 200
        await http.get("/health")
    by_name = {span.name: span for span in spans()}
    assert by_name.keys() == {"POST /v1/completions", "generate", "queue", "prefill", "decode"}
    assert {f"{span.context.trace_id:032x}" for span in spans()} == {PARENT.split("-")[1]}
    root, generate = by_name["POST /v1/completions"], by_name["generate"]
    assert f"{root.parent.span_id:016x}" == PARENT.split("-")[2]
    assert generate.parent.span_id == root.context.span_id
    for name, seconds in (("queue", 0.25), ("prefill", 0.5)):
        part = by_name[name]
        assert part.parent.span_id == generate.context.span_id
        assert (part.end_time - part.start_time) / 1e9 == pytest.approx(seconds, abs=1e-6)
    assert by_name["queue"].start_time == generate.start_time
    assert by_name["decode"].attributes["podstream.last_step"] >= by_name["decode"].attributes["podstream.first_step"]
    assert generate.attributes["gen_ai.usage.output_tokens"] == 5
    assert root.attributes["podstream.request_id"] == generate.attributes["podstream.request_id"] == "r1"


async def test_what_fails_is_a_trace_too(spans):
    async with running_replica() as replica, running_app(replica.address) as http:
        refused = await http.post(COMPLETIONS, json={**BODY, "model": "gpt-9"})
    (root,) = spans()
    assert root.attributes["http.response.status_code"] == refused.status_code == 404


def test_without_the_extra_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"podstream\[tracing\]"):
        tracing.turn_on("x", "http://127.0.0.1:4318")
