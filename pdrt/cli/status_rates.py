"""Speed from two `/status` documents: rates of counters, quantiles of histograms' growth. Pure.

Whatever the documents hold instead of what they should, there is an answer: a dash, or nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import msgspec

Record = Mapping[str, Any]


class WorkerRates(msgspec.Struct, frozen=True):
    """Of one worker, as they are shown."""

    tokens_per_second: str
    """Computed in steps."""
    step: str
    """Median duration of a step."""


class Rates(msgspec.Struct, frozen=True):
    """What is known of speed."""

    span: str
    """Over which time."""
    facts: tuple[str, ...]
    """Of the whole deployment, in words; empty when nothing has been served."""
    workers: Mapping[str, WorkerRates]
    """By incarnation."""


class Histogram(msgspec.Struct, frozen=True):
    """Values counted by bucket: `counts` has one more than `bounds`, for everything above."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    def minus(self, before: Histogram | None) -> Histogram:
        """What came after `before`; all of it, when that is of another process or kind."""
        if before is None or before.bounds != self.bounds or before.sum > self.sum:
            return self
        counts = tuple(b - a for a, b in zip(before.counts, self.counts, strict=True))
        if any(count < 0 for count in counts):
            return self
        return Histogram(self.bounds, counts, self.sum - before.sum)

    def quantile(self, share: float) -> float | None:
        """Linear within a bucket, as Prometheus does it; the last bound for what is above it.
        None when nothing was counted."""
        cumulated = list(accumulate(self.counts))
        if not cumulated or not cumulated[-1] or not self.bounds:
            return None
        rank = share * cumulated[-1]
        bucket = bisect_left(cumulated, rank)
        # The first bucket that holds anything, for a share of 0.
        while not self.counts[bucket]:
            bucket += 1
        if bucket == len(self.bounds):
            return self.bounds[-1]
        low = self.bounds[bucket - 1] if bucket else 0.0
        inside = rank - (cumulated[bucket] - self.counts[bucket])
        return low + (self.bounds[bucket] - low) * inside / self.counts[bucket]


def rates(document: Record, before: Record | None = None, seconds: float = 0.0) -> Rates:
    """From `before`, taken `seconds` earlier, to `document`; without it since each process began,
    which gives no rates."""
    earlier = {} if before is None or seconds <= 0 else _by_process(before)
    processes = _by_process(document)
    gateway = _identity(document.get("gateway"), "incarnation")
    now, then = processes.get(gateway, {}), earlier.get(gateway)
    facts = []
    for name, shown in (("output_tokens", "output tokens/s"), ("prompt_tokens", "prompt tokens/s")):
        rate = _rate(now, then, name, seconds)
        if rate is not None:
            facts.append(f"{shown} {rate:.1f}")
    for name, shown in (("ttft_seconds", "TTFT"), ("itl_seconds", "ITL")):
        grown = _grown(now, then, name)
        if grown is not None and grown.quantile(0.5) is not None:
            median, tail = grown.quantile(0.5), grown.quantile(0.99)
            facts.append(f"{shown} p50 {_duration(median)} p99 {_duration(tail)}")
    workers = {
        name: WorkerRates(
            _step_rate(totals, earlier.get(name), seconds),
            _duration(_median(_grown(totals, earlier.get(name), "step_seconds"))),
        )
        for name, totals in processes.items()
        if name != gateway
    }
    span = f"last {seconds:.0f} s" if then is not None else "since start"
    return Rates(span, tuple(facts), workers)


def _by_process(document: Record) -> dict[str, Record]:
    """Totals by incarnation."""
    found: dict[str, Record] = {}
    gateway = document.get("gateway")
    if isinstance(gateway, Mapping):
        found[_identity(gateway, "incarnation")] = record(gateway, "totals")
    workers = document.get("workers")
    for worker in workers if isinstance(workers, list) else []:
        if isinstance(worker, Mapping):
            totals = record(record(worker, "status"), "totals")
            found[_identity(worker, "worker")] = totals
    return found


def _rate(now: Record, then: Record | None, name: str, seconds: float) -> float | None:
    if then is None:
        return None
    new, old = now.get(name), then.get(name)
    if not isinstance(new, int | float) or not isinstance(old, int | float) or new < old:
        return None
    return (new - old) / seconds


def _step_rate(now: Record, then: Record | None, seconds: float) -> str:
    grown = None if then is None else _grown(now, then, "step_tokens")
    return "-" if grown is None else f"{grown.sum / seconds:.0f}"


def _grown(now: Record, then: Record | None, name: str) -> Histogram | None:
    new = _histogram(now, name)
    return None if new is None else new.minus(None if then is None else _histogram(then, name))


def _histogram(totals: Record, name: str) -> Histogram | None:
    try:
        found = msgspec.convert(record(totals, "histograms").get(name), Histogram)
    except msgspec.ValidationError:
        return None
    is_whole = len(found.counts) == len(found.bounds) + 1 and all(n >= 0 for n in found.counts)
    return found if is_whole else None


def _median(histogram: Histogram | None) -> float | None:
    return None if histogram is None else histogram.quantile(0.5)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def record(value: Any, key: str) -> Record:
    found = value.get(key) if isinstance(value, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _identity(value: Any, key: str) -> str:
    return str(value.get(key)) if isinstance(value, Mapping) else ""
