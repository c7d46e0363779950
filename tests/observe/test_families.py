"""The table of metrics against everything that names one: code, dashboard, documents."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdrt.observe import families
from pdrt.observe.families import FAMILIES, Family, Kind
from pdrt.observe.metrics import Metrics

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DASHBOARD = DOCKER / "grafana" / "dashboards" / "pdrt.json"
BASE_LABELS = {"role", "worker", "le"}
METRIC = re.compile(r"\bpdrt_\w+")


def sample_names(family: Family) -> set[str]:
    match family.kind:
        case Kind.COUNTER:
            return {f"{family.name}_total"}
        case Kind.GAUGE:
            return {family.name}
        case Kind.HISTOGRAM:
            return {f"{family.name}_{suffix}" for suffix in ("bucket", "sum", "count")}


BY_SAMPLE = {sample: family for family in FAMILIES for sample in sample_names(family)}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_named_as_prometheus_wants_it(family: Family) -> None:
    assert re.fullmatch(r"pdrt_[a-z]+(_[a-z]+)*", family.name)
    assert family.text
    assert not family.name.endswith(("_total", "_bucket", "_sum", "_count"))
    assert list(family.buckets) == sorted(set(family.buckets))
    assert bool(family.buckets) == (family.kind is Kind.HISTOGRAM)
    assert BASE_LABELS.isdisjoint(family.labels)


def test_names_are_used_once() -> None:
    assert len(BY_SAMPLE) == sum(len(sample_names(family)) for family in FAMILIES)


def test_every_family_is_filled_somewhere() -> None:
    source = inspect.getsource(inspect.getmodule(Metrics))  # type: ignore[arg-type]
    names = [name for name, value in vars(families).items() if isinstance(value, Family)]
    assert [name for name in names if not re.search(rf"\bf\.{name}\b", source)] == []


def expressions() -> Iterator[tuple[str, str]]:
    board = json.loads(DASHBOARD.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def test_the_dashboard_asks_for_metrics_and_labels_that_exist() -> None:
    asked = set()
    for title, expression in expressions():
        names = METRIC.findall(expression)
        assert names, title
        known: set[str] = set(BASE_LABELS)
        for name in names:
            assert name in BY_SAMPLE, f"{title}: {name}"
            known |= set(BY_SAMPLE[name].labels)
            asked.add(BY_SAMPLE[name].name)
        grouped = re.findall(r"\bby \(([^)]*)\)", expression)
        used = {label.strip() for group in grouped for label in group.split(",")}
        used |= set(re.findall(r"[{,]\s*(\w+)[!=]", expression))
        assert used <= known, f"{title}: {used - known}"
    assert {family.name for family in FAMILIES} == asked, "each metric has its place on the board"


def test_panels_do_not_overlap_and_have_their_own_ids() -> None:
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert taken.isdisjoint(cells), panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_the_dashboard_uses_the_data_source_that_is_provisioned() -> None:
    folder = DOCKER / "grafana" / "provisioning"
    source = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text())
    (uid,) = [entry["uid"] for entry in source["datasources"]]
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        assert panel.get("datasource", {}).get("uid", uid) == uid


def test_compose_mounts_what_is_there() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["observe"], "not started unless asked for"
        for mount in services[name]["volumes"]:
            if mount.startswith("."):
                assert (DOCKER / mount.split(":")[0]).exists(), mount
    scrape = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yaml").read_text())
    (job,) = scrape["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert target.split(":")[0] in services


def test_queries_in_the_document_exist() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert {name for name in METRIC.findall(text)} - set(BY_SAMPLE) == {
        family.name for family in FAMILIES if family.kind is Kind.HISTOGRAM
    }
