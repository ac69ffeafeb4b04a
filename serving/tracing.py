"""OpenTelemetry traces: a span for each HTTP request, below it one for each answer of the replica with its phases.

Off by default, and then nothing of OpenTelemetry is imported. It is an extra of the package: `pip install
'podstream[tracing]'`.
"""

import time
from typing import Any, NamedTuple

from serving.errors import ConfigError
from serving.request import FinishReason, Phases, Usage

NS = 1_000_000_000
EXPORT_S = 5.0
"""A collector that is gone holds up the end of a process no longer; spans that it does not take by then are lost."""

_tracer: Any = None
_provider: Any = None


class Arrived(NamedTuple):
    """A request that is to be recorded when it has ended."""

    traceparent: str
    request_id: str
    model: str


def is_on() -> bool:
    return _tracer is not None


def turn_on(service: str, url: str) -> None:
    """Send spans to an OTLP collector, such as http://127.0.0.1:4318. Raises ConfigError without the extra."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("--otlp-traces needs OpenTelemetry: pip install 'podstream[tracing]'.") from error
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    exporter = OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces", timeout=EXPORT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    use(provider)


def use(provider: Any) -> None:
    """Spans go there; None turns tracing off."""
    global _tracer, _provider
    _provider = provider
    _tracer = None if provider is None else provider.get_tracer("podstream")


def flush() -> None:
    """Send what waits, before an end that waits for nothing."""
    if _provider is not None:
        _provider.force_flush()


def start_request(method: str, path: str, headers: dict[str, str]) -> tuple[Any, str]:
    """The span of an HTTP request, within the client's trace if it named one, and what goes on from it as
    `traceparent`."""
    from opentelemetry.trace import SpanKind

    attributes = {"http.request.method": method, "url.path": path}
    span = _tracer.start_span(method, _context(headers), SpanKind.SERVER, attributes)
    context = span.get_span_context()
    return span, f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def end_request(span: Any, name: str, status: int, request_id: str) -> None:
    from opentelemetry.trace import StatusCode

    span.update_name(name)
    span.set_attributes({"http.response.status_code": status, "podstream.request_id": request_id})
    if status >= 500:
        span.set_status(StatusCode.ERROR)
    span.end()


def record_answer(arrived: Arrived, reason: FinishReason, usage: Usage, phases: Phases | None) -> None:
    """An answer that has just ended. Its phases are spans below it, as long as the engine says they were."""
    from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

    end_ns, phases = time.time_ns(), phases or Phases()
    start_ns = end_ns - int((phases.queue_s + phases.inference_s) * NS)
    attributes = {
        "gen_ai.operation.name": "generate_content",
        "gen_ai.request.model": arrived.model,
        "gen_ai.response.finish_reasons": (reason.value,),
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "podstream.cached_tokens": usage.cached_tokens,
        "podstream.request_id": arrived.request_id,
    }
    above = _context({"traceparent": arrived.traceparent})
    span = _tracer.start_span("generate", above, SpanKind.SERVER, attributes, start_time=start_ns)
    if reason is FinishReason.ERROR:
        span.set_status(StatusCode.ERROR)
    steps = {"podstream.first_step": phases.first_step, "podstream.last_step": phases.last_step}
    inside, at_ns = set_span_in_context(span), start_ns
    for name, seconds in (("queue", phases.queue_s), ("prefill", phases.prefill_s), ("decode", phases.decode_s)):
        if seconds > 0:
            part = _tracer.start_span(name, inside, attributes={} if name == "queue" else steps, start_time=at_ns)
            at_ns += int(seconds * NS)
            part.end(at_ns)
    span.end(end_ns)


def _context(headers: dict[str, str]) -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(headers)
