"""Spans as a collector gets them, and what tracing may cost: nothing when it is off, never time."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from pdrt.errors import ConfigError
from pdrt.observe import tracing
from pdrt.observe.tracing import Tracer, check_tracing
from tests.observe.collector import Collector

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = CLIENT[:-1] + "0"
HANG_SECONDS = 120.0


@pytest.fixture(autouse=True)
def no_exporter_is_left() -> Iterator[None]:
    """Their threads would open connections and say so in the middle of other tests."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive(), thread


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is exported, however long that takes."""
    monkeypatch.setattr(tracing, "CLOSE_SECONDS_MAX", HANG_SECONDS)


@pytest.mark.usefixtures("patient")
def test_spans_arrive_with_times_parents_and_attributes() -> None:
    collector = Collector()
    tracer = Tracer(collector.url, "gateway", "00d1")
    request = tracer.start("request", CLIENT, 10.0)
    tracer.record("decode.queue", request.traceparent, 10.5, 12.0, {"pdrt.room": "r/1"})
    request.end(13.0, {"pdrt.outcome": "stop", "pdrt.output_tokens": 7})
    tracer.close()
    collector.close()
    assert collector.paths == ["/v1/traces"]
    facts = collector.requests[0].resource_spans[0].resource.attributes
    texts = {fact.key: fact.value.string_value for fact in facts}
    assert (texts["service.name"], texts["service.instance.id"]) == ("pdrt", "00d1")
    spans = {span.name: span for span in collector.spans()}
    outer, inner = spans["request"], spans["decode.queue"]
    assert outer.role == "gateway"
    assert outer.trace == inner.trace == CLIENT.split("-")[1]
    assert outer.parent == CLIENT.split("-")[2]
    assert inner.parent == outer.id
    assert outer.end - outer.start == 3_000_000_000
    assert inner.end - inner.start == 1_500_000_000
    assert outer.attributes["pdrt.output_tokens"] == 7


@pytest.mark.parametrize("header", ["", "nonsense", CLIENT.replace("00-", "zz-"), "0" * 5000])
def test_without_a_valid_parent_a_trace_begins(header: str) -> None:
    tracer = Tracer("http://127.0.0.1:9", "gateway", "00d1")
    one, two = tracer.start("request", header, 0.0), tracer.start("request", header, 0.0)
    traces = {span.traceparent.split("-")[1] for span in (one, two)}
    assert len(traces) == 2
    assert all(int(span.traceparent[-2:], 16) & 1 for span in (one, two)), "sampled"
    tracer.close()


@pytest.mark.usefixtures("patient")
def test_a_client_that_does_not_sample_is_heeded() -> None:
    collector = Collector()
    tracer = Tracer(collector.url, "gateway", "00d1")
    span = tracer.start("request", UNSAMPLED, 0.0)
    assert not int(span.traceparent[-2:], 16) & 1
    tracer.record("decode.queue", span.traceparent, 0.0, 1.0, {})
    span.end(1.0, {})
    tracer.close()
    collector.close()
    assert collector.requests == []


def test_a_collector_that_is_away_costs_no_time_and_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "EXPORT_SECONDS_MAX", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        tracer = Tracer(f"http://127.0.0.1:{silent.getsockname()[1]}", "decode", "00d1")
        for _ in range(20_000):
            tracer.record("decode.queue", CLIENT, 0.0, 1.0, {"pdrt.room": "r/1"})
        tracer.close()


def test_off_it_passes_the_clients_context_on_and_imports_nothing() -> None:
    script = f"""
import sys
from pdrt.observe.tracing import Tracer, check_tracing
check_tracing(None)
tracer = Tracer(None, "gateway", "00d1")
span = tracer.start("request", {CLIENT!r}, 0.0)
assert span.traceparent == {CLIENT!r}
assert tracer.start("request", "nonsense", 0.0).traceparent == ""
tracer.record("decode.queue", span.traceparent, 0.0, 1.0, {{}})
span.end(1.0, {{"pdrt.outcome": "stop"}})
tracer.close()
print(any(name.startswith("opentelemetry") for name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=HANG_SECONDS, check=True
    )
    assert done.stdout == b"False\n"


def test_the_console_gets_one_json_object_a_line() -> None:
    script = f"""
from pdrt.observe.tracing import Tracer
tracer = Tracer("console", "decode", "00d1")
for number in range(3):
    tracer.record("decode.queue", {CLIENT!r}, 0.0, 1.0, {{"pdrt.number": number}})
tracer.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=HANG_SECONDS, check=True
    )
    spans = [json.loads(line) for line in done.stderr.splitlines()]
    assert [span["attributes"]["pdrt.number"] for span in spans] == [0, 1, 2]
    assert {span["parent_id"] for span in spans} == {"0x" + CLIENT.split("-")[2]}


@pytest.mark.parametrize(
    "endpoint", ["collector:4318", "ftp://x", "http://", "Console", "http://["]
)
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        check_tracing(endpoint)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tracing("console")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'pdrt\[otel\]'"):
        check_tracing("console")
