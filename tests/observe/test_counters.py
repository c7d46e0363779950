"""Counters of pure code reach Prometheus once each."""

from __future__ import annotations

from collections import Counter

from pdrt.observe.counters import CounterBridge


def test_only_increases_are_passed_on() -> None:
    bridge, counts = CounterBridge(), list[tuple[str, int]]()

    def count(label: str, increase: int) -> None:
        counts.append((label, increase))

    totals = Counter({"size": 2})
    bridge.pass_on("rejected", totals, count)
    bridge.pass_on("rejected", totals, count)
    totals.update({"size": 1, "version": 4})
    bridge.pass_on("rejected", totals, count)
    assert counts == [("size", 2), ("size", 1), ("version", 4)]


def test_families_do_not_mix() -> None:
    bridge, counts = CounterBridge(), list[int]()
    bridge.pass_on("rejected", {"x": 2}, lambda _, increase: counts.append(increase))
    bridge.pass_on("stale", {"x": 3}, lambda _, increase: counts.append(increase))
    assert counts == [2, 3]
