"""One trace from HTTP through gRPC to the steps, as a collector reads it from the two real programs."""

import pytest

from tests.collector import attributes_of
from tests.e2e.test_faults import eventually

pytestmark = pytest.mark.e2e

TRACE, CLIENT = "0123456789abcdef0123456789abcdef", "fedcba9876543210"
NAMES = {"POST /v1/chat/completions", "generate", "queue", "prefill", "decode"}


@pytest.mark.parametrize("stream", [True, False])
def test_spans_of_both_processes_are_one_trace(server, collector, stream):
    trace_id = TRACE if stream else TRACE[::-1]
    answer = server.client.chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": "Count to ten."}], max_tokens=12, stream=stream,
        extra_headers={"traceparent": f"00-{trace_id}-{CLIENT}-01", "x-request-id": f"traced-{stream}"},
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    if stream:
        list(answer)
    eventually(lambda: collector.of_trace(trace_id).keys() == NAMES)
    spans = collector.of_trace(trace_id)
    (gateway, root), (replica, generate) = spans["POST /v1/chat/completions"], spans["generate"]
    assert (gateway, replica) == ("podstream-gateway", "podstream-replica")
    assert root.parent_span_id.hex() == CLIENT
    assert generate.parent_span_id == root.span_id
    assert root.start_time_unix_nano < generate.start_time_unix_nano < generate.end_time_unix_nano
    queue, prefill, decode = (spans[name][1] for name in ("queue", "prefill", "decode"))
    assert {part.parent_span_id for part in (queue, prefill, decode)} == {generate.span_id}
    assert queue.end_time_unix_nano <= prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano <= decode.start_time_unix_nano < generate.end_time_unix_nano
    told = attributes_of(decode)
    assert 0 < told["podstream.first_step"] < told["podstream.last_step"]
    assert attributes_of(generate)["gen_ai.usage.output_tokens"] == 12
    ids = {attributes_of(span)["podstream.request_id"] for span in (root, generate)}
    assert ids == {f"traced-{stream}"}
