"""What a scraper reads."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from pdrt.observe.metrics import Metrics


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """By name and label values, in the order of the labels, role and worker left out."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            assert sample.labels["role"] == "decode"
            assert sample.labels["worker"] == "00000000000000d0"
            rest = [v for k, v in sorted(sample.labels.items()) if k not in ("role", "worker")]
            found[sample.name, *rest] = sample.value
    return found


def make() -> Metrics:
    return Metrics("decode", "00000000000000d0")


def test_gauges_show_the_latest_value() -> None:
    metrics = make()
    metrics.set_pages({"free": 9, "lease": 1})
    metrics.set_pages({"free": 7, "lease": 3})
    metrics.set_leases({"granted": 1, "revoking": 2})
    metrics.set_rooms({"open": 4})
    metrics.set_quarantine(2, {"lost": 1})
    metrics.set_quarantine(2, {"client_gone": 1})
    metrics.set_workers({("decode", "live"): 2, ("prefill", "lost"): 1})
    metrics.set_workers({("decode", "live"): 1})
    metrics.set_queue(5)
    found = samples(metrics)
    assert found["pdrt_pages", "free", "0"] == 7
    assert found["pdrt_pages", "lease", "0"] == 3
    assert found["pdrt_leases", "revoking"] == 2
    assert found["pdrt_rooms", "open"] == 4
    assert found[("pdrt_quarantined_pages",)] == 2
    assert found["pdrt_quarantined_leases", "lost"] == 0
    assert found["pdrt_quarantined_leases", "client_gone"] == 1
    assert found["pdrt_workers", "live", "decode"] == 1
    assert found["pdrt_workers", "lost", "prefill"] == 0, "who is gone is no longer shown"
    assert found[("pdrt_queue",)] == 5


def test_counters_add_up() -> None:
    metrics = make()
    for _ in range(2):
        metrics.count_transfer("local", 1000, 0)
        metrics.count_rejected_frame("size", 3)
        metrics.count_stale_message("old_seq", 2)
        metrics.count_recomputed_prompt_tokens(40)
        metrics.count_request("length")
        metrics.count_fence("local")
        metrics.count_preemption()
    found = samples(metrics)
    assert found["pdrt_transfer_bytes_total", "local", "0"] == 2000
    assert found["pdrt_rejected_frames_total", "size"] == 6
    assert found["pdrt_stale_messages_total", "old_seq"] == 4
    assert found[("pdrt_recomputed_prompt_tokens_total",)] == 80
    assert found["pdrt_requests_total", "length"] == 2
    assert found["pdrt_fences_total", "local"] == 2
    assert found[("pdrt_preemptions_total",)] == 2


def test_histograms() -> None:
    metrics = make()
    metrics.observe_drain(0.2)
    metrics.observe_ttft(0.3)
    metrics.observe_itl(0.02)
    metrics.observe_handover("transfer", 0.004)
    found = samples(metrics)
    for name in ("drain", "ttft", "itl"):
        assert found[(f"pdrt_{name}_seconds_count",)] == 1
    assert found["pdrt_handover_seconds_sum", "transfer"] == 0.004


def test_one_help_and_type_per_family_and_no_created_series() -> None:
    metrics = make()
    metrics.count_preemption()
    metrics.observe_itl(1.0)
    text = metrics.render().decode()
    kinds = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(kinds) == len(set(kinds))
    assert "_created" not in text


def test_processes_do_not_share() -> None:
    one, two = make(), make()
    one.count_preemption()
    assert ("pdrt_preemptions_total",) not in {k for k, v in samples(two).items() if v}


def test_label_values_are_snake_case() -> None:
    """A scrape shows reasons of all roles side by side."""
    package = Path(__file__).parents[2] / "pdrt"
    pattern = re.compile(r'(?:stale\[|rejected\[|count_\w+\()"([^"]*)"')
    reasons = [r for path in package.rglob("*.py") for r in pattern.findall(path.read_text())]
    assert len(reasons) > 10
    assert [reason for reason in reasons if not re.fullmatch(r"[a-z]+(_[a-z]+)*", reason)] == []
