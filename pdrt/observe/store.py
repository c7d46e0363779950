"""Values of metrics and their text. Plain numbers in dictionaries, changed on one loop only.

prometheus_client takes a lock per change and builds a key of strings per `labels()`: 3 µs a token
where this takes 0.2, and its text takes 2 ms of the loop where this takes 0.2. The format is
Prometheus's text format, version 0.0.4.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from pdrt.observe.families import Family, Kind

Labels = tuple[str, ...]
SERIES_MAX = 256
"""Of one family and process. Label values are our own words, never a client's: a family that
grows beyond this has a bug, and what is new is counted under `other`."""
OTHER = "other"


class Distribution:
    """One series of a histogram."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Per bucket, not cumulated; the last is everything above."""
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, which belongs to the first bucket whose bound is not below it."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Store:
    """All values of one process, by family and label values."""

    def __init__(self, role: str, worker: str) -> None:
        """Every series carries these two labels."""
        self._base = (role, worker)
        self._numbers: dict[str, dict[Labels, float]] = {}
        self._distributions: dict[str, dict[Labels, Distribution]] = {}
        self._families: dict[str, Family] = {}

    def add(self, family: Family, amount: float, *labels: str) -> None:
        """To a counter."""
        values = self._series(family)
        if labels in values:
            values[labels] += amount
        else:
            labels = _bounded(values, labels)
            values[labels] = values.get(labels, 0) + amount

    def set(self, family: Family, value: float, *labels: str) -> None:
        """A gauge, or a counter that somebody else keeps."""
        values = self._series(family)
        values[_bounded(values, labels)] = value

    def distribution(self, family: Family, *labels: str) -> Distribution:
        """One series of a histogram, to keep where it is used often."""
        assert family.kind is Kind.HISTOGRAM, family.name
        assert len(labels) == len(family.labels), (family.name, labels)
        self._families[family.name] = family
        series = self._distributions.setdefault(family.name, {})
        if labels not in series:
            labels = _bounded(series, labels)
        if labels not in series:
            series[labels] = Distribution(family.buckets)
        return series[labels]

    def numbers(self, family: Family) -> dict[Labels, float]:
        """The values of a counter or gauge by label values."""
        return dict(self._numbers.get(family.name, {}))

    def _series(self, family: Family) -> dict[Labels, float]:
        values = self._numbers.get(family.name)
        if values is None:
            assert family.kind is not Kind.HISTOGRAM, family.name
            self._families[family.name] = family
            values = self._numbers[family.name] = {}
        return values

    def render(self) -> bytes:
        """Prometheus text: each family's HELP and TYPE once, then its samples."""
        return "".join(
            line for family in self._families.values() for line in self._lines(family)
        ).encode()

    def _lines(self, family: Family) -> Iterator[str]:
        name = f"{family.name}_total" if family.kind is Kind.COUNTER else family.name
        yield f"# HELP {name} {family.text}\n# TYPE {name} {family.kind.value}\n"
        if family.kind is not Kind.HISTOGRAM:
            for labels, value in self._numbers[family.name].items():
                yield f"{name}{{{self._text(family, labels)}}} {float(value)}\n"
            return
        for labels, series in self._distributions[family.name].items():
            text, total = self._text(family, labels), 0
            for bound, count in zip((*series.bounds, "+Inf"), series.counts, strict=True):
                total += count
                yield f'{name}_bucket{{{text},le="{bound}"}} {float(total)}\n'
            yield f"{name}_count{{{text}}} {float(total)}\n{name}_sum{{{text}}} {series.sum}\n"

    def _text(self, family: Family, labels: Labels) -> str:
        """`name="value",…` of one series, in the order of the names."""
        names, values = ("role", "worker", *family.labels), (*self._base, *labels)
        pairs = sorted(zip(names, values, strict=True))
        return ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _bounded(series: dict[Labels, float] | dict[Labels, Distribution], labels: Labels) -> Labels:
    """The labels, or `other` for each where there are too many already."""
    if labels in series or len(series) < SERIES_MAX:
        return labels
    return (OTHER,) * len(labels)
