"""What operators see of one request: its spans, its log lines, its metrics, in three processes."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from pdrt.cli.main import main
from pdrt.observe.families import FAMILIES
from tests.e2e.conftest import TINY_FLAGS
from tests.e2e.deployment import ROOT, Deployment, wait
from tests.observe.collector import Collector

pytestmark = pytest.mark.e2e

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {
    "traceparent": f"00-{TRACE}-{PARENT}-01",
    "x-request-id": "the-one",
    "authorization": "Bearer a-secret-of-mine",
}
PROMPT = "zebra quokka okapi"
WANTED = {
    "request": "gateway",
    "decode.queue": "decode",
    "decode.prefill_wait": "decode",
    "decode.transfer_wait": "decode",
    "decode.generate": "decode",
    "prefill.queue": "prefill",
    "prefill.compute": "prefill",
    "prefill.transfer": "prefill",
}


class Observed:
    """A deployment, and what one request has left behind."""

    def __init__(self, deployment: Deployment, collector: Collector, answer: Any) -> None:
        self.deployment = deployment
        self.collector = collector
        self.answer = answer

    def lines(self) -> list[dict[str, Any]]:
        """Log lines, each of which must be JSON."""
        text = self.deployment.processes["up"].text()
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def lines_of_request(self) -> dict[str, dict[str, Any]] | None:
        """By role, once there is one of each."""
        lines = {at["role"]: at for at in self.lines() if at.get("request_id") == "the-one"}
        return lines if lines.keys() == {"gateway", "decode", "prefill"} else None


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Observed]:
    collector = Collector()
    with Deployment(tmp_path_factory.mktemp("observed"), str(tiny_model)) as deployment:
        deployment.up(*TINY_FLAGS, "--log-format", "json", "--otlp-endpoint", collector.url)
        deployment.wait_ready()
        body = {"model": deployment.name, "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
        url = f"{deployment.url}/v1/completions"
        answer = httpx2.post(url, json=body, headers=HEADERS, timeout=60.0, trust_env=False)
        assert answer.status_code == 200, answer.text
        deployment.wait_whole()
        wait(lambda: len(collector.spans()) >= len(WANTED), "all spans")
        yield Observed(deployment, collector, answer.json())
    collector.close()


def test_the_spans_of_a_request_form_one_tree(observed: Observed) -> None:
    spans = {span.name: span for span in observed.collector.spans()}
    assert {name: span.role for name, span in spans.items()} == WANTED
    assert {span.trace for span in spans.values()} == {TRACE}, "the client's"
    root = spans.pop("request")
    assert root.parent == PARENT
    assert {span.parent for span in spans.values()} == {root.id}
    assert all(span.start <= span.end for span in spans.values())
    assert spans["prefill.compute"].start >= spans["prefill.queue"].start >= root.start
    assert root.attributes["pdrt.output_tokens"] == 8
    assert root.attributes["pdrt.outcome"] == "length"
    assert spans["prefill.transfer"].attributes["pdrt.bytes"] > 0
    ids = {span.attributes["pdrt.request_id"] for span in (root, *spans.values())}
    assert ids == {"the-one"}


def test_its_log_lines_share_its_id_and_have_the_documented_fields(observed: Observed) -> None:
    lines = wait(observed.lines_of_request, "a line of each role")
    shared = {"time", "level", "worker", "logger", "message", "outcome", "seconds",
              "prompt_tokens", "cached_tokens"}  # fmt: skip
    assert all(shared <= set(line) for line in lines.values())
    assert lines["gateway"]["ttft_seconds"] > 0
    assert {"queued_seconds", "prefill_seconds", "transfer_seconds", "decode_seconds"} <= set(
        lines["decode"]
    )
    assert {"queued_seconds", "compute_seconds", "drain_seconds", "bytes"} <= set(lines["prefill"])
    assert lines["decode"]["room"] == lines["prefill"]["room"]
    assert lines["decode"]["output_tokens"] == lines["gateway"]["output_tokens"] == 8


def test_neither_prompt_nor_output_nor_key_is_logged(observed: Observed) -> None:
    text = observed.deployment.processes["up"].text()
    output = observed.answer["choices"][0]["text"]
    assert "quokka" not in text
    assert "a-secret-of-mine" not in text
    assert len(output) > 3
    assert output not in text
    assert "quokka" not in str(observed.collector.spans())


def test_every_line_on_stderr_is_json(observed: Observed) -> None:
    text = observed.deployment.processes["up"].text()
    shown = [line for line in text.splitlines() if not line.startswith("{")]
    # What `up` shows of itself once it is ready goes to stdout.
    assert not [line for line in shown if "|" in line], shown


def test_metrics_of_a_real_deployment_are_those_documented(observed: Observed) -> None:
    samples = observed.deployment.metrics()
    names = {family.name for family in FAMILIES}
    found = {name for name, _, _ in samples}
    stems = {n.removesuffix("_total") for n in found}
    stems = {s.removesuffix(x) for s in stems for x in ("_bucket", "_sum", "_count", "")} & names
    seldom = {"pdrt_fences", "pdrt_rejected_frames", "pdrt_drain_seconds", "pdrt_stale_messages",
              "pdrt_recomputed_prompt_tokens", "pdrt_quarantined_leases", "pdrt_room_ends",
              "pdrt_refused_peers", "pdrt_refused_writes", "pdrt_kv_checksum_pages",
              "pdrt_local_prefill_requests"}  # fmt: skip
    assert names - stems <= seldom
    metric = observed.deployment.metric
    assert metric("pdrt_output_tokens_total", role="gateway") == 8
    assert metric("pdrt_output_tokens_total", role="decode") == 8
    assert metric("pdrt_workers", worker_role="decode", state="live") == 1
    assert metric("pdrt_pairs") == 1
    assert metric("pdrt_request_seconds_count") == 1
    assert metric("pdrt_step_seconds_count", role="prefill") >= 1
    assert metric("pdrt_event_loop_lag_seconds_count") > 0
    assert (
        len({labels["worker"] for n, labels, _ in samples if n.endswith("resident_memory_bytes")})
        == 3
    )


def test_status_and_bench_as_commands(
    observed: Observed, capsys: pytest.CaptureFixture[str]
) -> None:
    url = observed.deployment.url
    assert main(["status", "--url", url]) == 0
    text = capsys.readouterr().out
    assert "TTFT p50" in text
    assert "since start" in text
    arguments = ["bench", "--url", url, "--concurrency", "2", "--requests", "4"]
    arguments += ["--prompt-tokens", "20", "--output-tokens", "5", "--vocabulary", "200"]
    assert main(arguments) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[:5] == ["c2", "20", "5", "4", "0"]


def test_every_field_of_the_status_is_documented(observed: Observed) -> None:
    status = observed.deployment.status()
    assert status is not None
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "status.md").read_text()))
    keys = {*status, *status["gateway"], *status["gateway"]["totals"]}
    for worker in status["workers"]:
        keys |= {*worker, *worker["load"], *worker["status"], *worker["status"]["totals"]}
        for name in ("leases", "requests", "rooms", "writers", "decode_peers", "gateways"):
            for entry in worker["status"].get(name, []):
                keys |= set(entry)
    assert keys - documented == set()


def test_the_live_view_in_a_pipe_ends_with_ctrl_c(observed: Observed) -> None:
    run = observed.deployment.run("watch", "status", "--url", observed.deployment.url, "--watch=.2")
    run.wait_for(r"last \d+ s", 2)
    run.send(signal.SIGINT)
    assert run.wait() == 0
    assert "\x1b" not in run.text()
