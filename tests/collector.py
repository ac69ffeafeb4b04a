"""A collector of traces: what OTLP's exporter sends over HTTP is read by OTLP's own messages and kept."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Collector(ThreadingHTTPServer):
    """`spans` holds (service, span) in the order of their arrival."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def of_trace(self, trace_id):
        """{name: (service, span)} of one trace, so far."""
        return {span.name: (service, span) for service, span in [*self.spans] if span.trace_id.hex() == trace_id}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp

        assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
        sent = otlp.ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        for group in sent.resource_spans:
            (service,) = [a.value.string_value for a in group.resource.attributes if a.key == "service.name"]
            self.server.spans += [(service, span) for scope in group.scope_spans for span in scope.spans]
        answer = otlp.ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@contextmanager
def collecting():
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.05,))
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


def attributes_of(span):
    """As plain values."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
