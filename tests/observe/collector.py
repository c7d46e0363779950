"""An OTLP/HTTP collector for tests."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class SpanSeen(msgspec.Struct, frozen=True):
    """One span as it arrived; ids in hex, times in nanoseconds."""

    name: str
    role: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    attributes: dict[str, str | int | float]


class Collector:
    """Takes whatever is sent, on a thread of its own."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.requests: list[ExportTraceServiceRequest] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.paths.append(self.path)
                outer.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def spans(self) -> list[SpanSeen]:
        return [
            SpanSeen(
                span.name,
                {a.key: a.value.string_value for a in resource.resource.attributes}["pdrt.role"],
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                {a.key: _value(a.value) for a in span.attributes},
            )
            for request in list(self.requests)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def _value(value: object) -> str | int | float:
    kind = value.WhichOneof("value")  # type: ignore[attr-defined]
    found = getattr(value, kind)
    assert isinstance(found, str | int | float)
    return found
