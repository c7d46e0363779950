"""What a run has seen, as JSON and as tables."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from tests.chaos.load import Tally
from tests.chaos.proc import Use


class Report:
    """Sums over rounds."""

    def __init__(self) -> None:
        self.rounds = 0
        """Those that ended well."""
        self.tally = Tally()
        self.aborts: Counter[str] = Counter()
        """Of storms: by the phase that the request was in."""
        self._ready_seconds: dict[str, list[float]] = {}
        """By kind of fault: from its undoing until all were paired again. Faults of one wave share
        theirs."""
        self._whole_seconds: list[float] = []
        """From the last client's answer until nothing was held anywhere."""
        self._growth = Use(0, 0, 0)
        """The most that any process has grown by."""

    def fault(self, kind: str, ready_seconds: float) -> None:
        self._ready_seconds.setdefault(kind, []).append(ready_seconds)

    def whole(self, seconds: float) -> None:
        self._whole_seconds.append(seconds)

    def growth(self, growth: Use) -> None:
        most = self._growth
        self._growth = Use(
            max(most.fds, growth.fds),
            max(most.threads, growth.threads),
            max(most.anonymous_bytes, growth.anonymous_bytes),
        )

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        tally = self.tally
        return {
            "rounds": self.rounds,
            "faults": {
                kind: {
                    "count": len(seconds),
                    "ready_seconds_median": round(statistics.median(seconds), 2),
                    "ready_seconds_max": round(max(seconds), 2),
                }
                for kind, seconds in sorted(self._ready_seconds.items())
            },
            "requests": {
                "answered": tally.answered,
                "retried": tally.retried,
                "left": tally.left,
                "lost": len(tally.lost),
                "longest_seconds": round(tally.longest_seconds, 2),
            },
            "aborts": dict(self.aborts),
            "lost": tally.lost,
            "errors": dict(tally.errors),
            "broken_connections": dict(tally.broken),
            "whole_seconds_max": round(max(self._whole_seconds, default=0.0), 2),
            "growth_max": {
                "fds": self._growth.fds,
                "threads": self._growth.threads,
                "anonymous_bytes": self._growth.anonymous_bytes,
            },
        }

    def __str__(self) -> str:
        """For people."""
        facts = self.facts()
        lines = [f"{'fault':<28}{'times':>6}{'ready s, median':>17}{'most':>8}"]
        for kind, row in facts["faults"].items():
            seconds = f"{row['ready_seconds_median']:>17.1f}{row['ready_seconds_max']:>8.1f}"
            lines.append(f"{kind:<28}{row['count']:>6}{seconds}")
        requests = ", ".join(f"{value} {name}" for name, value in facts["requests"].items())
        lines += ["", f"{self.rounds} rounds; requests: {requests}"]
        if self.aborts:
            phases = ", ".join(f"{n} in {phase}" for phase, n in self.aborts.items())
            lines.append(f"aborts in a storm: {phases}")
        for title in ("errors", "broken_connections"):
            lines += [f"  {count} × {text}" for text, count in facts[title].items()]
        lines += [f"  LOST: {text}" for text in facts["lost"]]
        growth = facts["growth_max"]
        lines.append(
            f"pools whole after {facts['whole_seconds_max']} s at most; a process grew by at most "
            f"{growth['fds']} fds, {growth['threads']} threads, "
            f"{growth['anonymous_bytes'] / 2**20:.1f} MiB"
        )
        return "\n".join(lines)
