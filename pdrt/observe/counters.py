"""Bridges counters that pure code keeps to Prometheus counters, which can only be added to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping


class CounterBridge:
    """Remembers, per family and label, what has been passed on."""

    def __init__(self) -> None:
        self._passed_on: Counter[tuple[str, str]] = Counter()

    def pass_on(
        self, family: str, totals: Mapping[str, int], count: Callable[[str, int], None]
    ) -> None:
        """`count(label, increase)` for every label that has grown since the last call."""
        for label, total in totals.items():
            increase = total - self._passed_on[family, label]
            if increase:
                count(label, increase)
                self._passed_on[family, label] = total
