"""Values and their text, read back by prometheus_client's own parser."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pdrt.observe.families import Family, Kind
from pdrt.observe.store import OTHER, SERIES_MAX, Store

COUNTER = Family("t_events", Kind.COUNTER, "Events", ("reason",))
GAUGE = Family("t_level", Kind.GAUGE, "Level")
HISTOGRAM = Family("t_seconds", Kind.HISTOGRAM, "Seconds", ("phase",), (0.5, 1.0))


def parsed(store: Store) -> dict[tuple[str, ...], float]:
    """By name and label values, role and worker left out."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(store.render().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("role", "worker")}
            found[sample.name, *labels.values()] = sample.value
    return found


@given(st.text(), st.floats(allow_nan=False))
def test_any_label_and_value_survives_the_text(reason: str, value: float) -> None:
    store = Store("decode", "d0")
    store.add(COUNTER, 3, reason)
    store.set(GAUGE, value)
    assert parsed(store) == {("t_events_total", reason): 3, ("t_level",): value}


@given(st.lists(st.floats(0, 2), min_size=1))
def test_a_histogram_counts_each_value_up_to_its_bound(values: list[float]) -> None:
    store = Store("decode", "d0")
    for value in values:
        store.distribution(HISTOGRAM, "p").observe(value)
    found = parsed(store)
    for bound in (0.5, 1.0):
        assert found["t_seconds_bucket", "p", str(bound)] == sum(v <= bound for v in values)
    assert found["t_seconds_bucket", "p", "+Inf"] == found["t_seconds_count", "p"] == len(values)


def test_a_value_seen_several_times() -> None:
    store = Store("decode", "d0")
    store.distribution(HISTOGRAM, "p").observe(0.25, 4)
    found = parsed(store)
    assert (found["t_seconds_count", "p"], found["t_seconds_sum", "p"]) == (4, 1.0)


def test_series_are_bounded() -> None:
    store = Store("decode", "d0")
    for number in range(SERIES_MAX + 50):
        store.add(COUNTER, 1, str(number))
        store.distribution(HISTOGRAM, str(number)).observe(0.1)
    found = parsed(store)
    assert found["t_events_total", OTHER] == 50
    assert found["t_seconds_count", OTHER] == 50
