"""OpenTelemetry spans of requests, or nothing at all.

Spans are made when they are over, from times that were taken anyway: what serves tokens knows
nothing of tracing. Nothing of OpenTelemetry is imported unless traces are asked for.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pdrt import __version__
from pdrt.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SpanExporter

Attributes = Mapping[str, str | int | float | bool]

CONSOLE = "console"
TRACES_PATH = "/v1/traces"
"""Of an OTLP/HTTP collector that is given without a path."""
SPANS_MAX = 8192
"""Waiting to be exported, some 1 KB each; then the oldest are dropped."""
EXPORT_SECONDS = 1.0
"""Between two exports."""
EXPORT_SECONDS_MAX = 5.0
"""Of one export, repeats included."""
CLOSE_SECONDS_MAX = 2.0
"""For the last spans, at the end of the process."""
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
"""W3C Trace Context, version 00."""


def check_tracing(endpoint: str | None) -> None:
    """Called before anything heavy begins.

    Raises:
        ConfigError: the endpoint is neither a URL nor `console`, or OpenTelemetry is missing.
    """
    if endpoint is None:
        return
    if endpoint != CONSOLE:
        try:
            parts = urlsplit(endpoint)
        except ValueError as error:
            raise ConfigError(f"--otlp-endpoint {endpoint!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(
                f"--otlp-endpoint {endpoint!r} is not an http:// or https:// URL, nor 'console'"
            )
    for module in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        if not _is_installed(module):
            raise ConfigError(
                f"--otlp-endpoint needs OpenTelemetry ({module} is missing): "
                "pip install 'pdrt[otel]'"
            )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


class Span:
    """One that has begun. Whoever starts it ends it, once."""

    def __init__(self, traceparent: str, span: trace.Span | None, offset: int) -> None:
        self.traceparent = traceparent
        """For those that this span causes; empty when nothing is traced."""
        self._span = span
        self._offset = offset

    def end(self, at: float, attributes: Attributes) -> None:
        """`at`: monotonic seconds."""
        if self._span is not None:
            self._span.set_attributes(attributes)
            self._span.end(_nanoseconds(at, self._offset))


class Tracer:
    """Of one process. Nothing here waits, but for `close`."""

    def __init__(self, endpoint: str | None, role: str, worker: str) -> None:
        """Off without `endpoint`; see `check_tracing`."""
        self._sdk = None if endpoint is None else _Sdk(_exporter(endpoint), role, worker)

    @property
    def is_on(self) -> bool:
        return self._sdk is not None

    def start(self, name: str, parent: str, at: float) -> Span:
        """Begin a span at `at` (monotonic seconds).

        Args:
            parent: a `traceparent`, also one from outside; one that is none begins a new trace.
        """
        if _TRACEPARENT.fullmatch(parent) is None:
            parent = ""
        if self._sdk is None:
            return Span(parent, None, 0)
        return self._sdk.start(name, parent, at)

    def record(
        self, name: str, parent: str, start: float, end: float, attributes: Attributes
    ) -> None:
        """A span that is over, from `start` to `end` (monotonic seconds). Nothing without a
        `parent`: who began the request does not trace it."""
        if self._sdk is not None and parent:
            self._sdk.start(name, parent, start).end(end, attributes)

    def close(self) -> None:
        """Export what is left, for two seconds at most."""
        if self._sdk is not None:
            # OpenTelemetry's own way out waits for 30 seconds.
            thread = threading.Thread(target=self._sdk.close, name="traces", daemon=True)
            thread.start()
            thread.join(CLOSE_SECONDS_MAX)


class _Sdk:
    """OpenTelemetry's, with a batch processor whose thread exports."""

    def __init__(self, exporter: SpanExporter, role: str, worker: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create(
            {
                "service.name": "pdrt",
                "service.version": __version__,
                "service.instance.id": worker,
                "pdrt.role": role,
            }
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter, max_queue_size=SPANS_MAX, schedule_delay_millis=EXPORT_SECONDS * 1000
            )
        )
        self._tracer = self._provider.get_tracer("pdrt", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def start(self, name: str, parent: str, at: float) -> Span:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        # The wall clock may be set while we run: each span is placed by the clocks of its start.
        offset = time.time_ns() - time.monotonic_ns()
        context = self._propagator.extract({"traceparent": parent}, Context())
        span = self._tracer.start_span(name, context, start_time=_nanoseconds(at, offset))
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span, Context()))
        return Span(carrier["traceparent"], span, offset)

    def close(self) -> None:
        self._provider.shutdown()


def _nanoseconds(at: float, offset: int) -> int:
    return int(at * 1e9) + offset


def _exporter(endpoint: str) -> SpanExporter:
    if endpoint == CONSOLE:
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(
            out=sys.stderr, formatter=lambda span: span.to_json(indent=None) + "\n"
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + TRACES_PATH
    return OTLPSpanExporter(url, timeout=EXPORT_SECONDS_MAX)
