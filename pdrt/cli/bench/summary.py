"""What a run's samples say. Pure."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from pdrt.cli.bench.client import Sample
from pdrt.cli.bench.load import Run


class Slo(msgspec.Struct, frozen=True):
    """What a request must keep to count as good; None is kept always."""

    ttft_seconds: float | None = None
    itl_seconds: float | None = None
    """Of a request's mean time between tokens, its TPOT."""

    def is_kept(self, sample: Sample) -> bool:
        if sample.error is not None:
            return False
        tpot = sample.tpot or 0.0
        return sample.ttft <= _or_inf(self.ttft_seconds) and tpot <= _or_inf(self.itl_seconds)


class Quantiles(msgspec.Struct, frozen=True):
    """Milliseconds; all 0 when nothing was measured."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class Summary(msgspec.Struct, frozen=True):
    """One row."""

    requests: int
    failed: int
    errors: dict[str, int]
    seconds: float
    late_ms: float
    prompt_tokens: int
    output_tokens: int
    ttft_ms: Quantiles
    itl_ms: Quantiles
    """Between two events with text."""
    events_per_token: float
    """1 where every token comes by itself. An endpoint that puts several into one event has fewer
    and longer gaps: compare TPOT then, not ITL."""
    tpot_ms: Quantiles
    """Of requests: their mean time per output token after the first."""
    e2e_ms: Quantiles
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    goodput_requests_per_second: float
    """Requests that kept the SLO."""
    good_share: float


def summarize(run: Run, slo: Slo) -> Summary:
    """Failed requests count in `failed`, and against the goodput, nowhere else."""
    good = [sample for sample in run.samples if sample.error is None]
    kept = sum(slo.is_kept(sample) for sample in run.samples)
    output_tokens = sum(sample.output_tokens for sample in good)
    prompt_tokens = sum(sample.prompt_tokens for sample in good)
    gaps = [b - a for sample in good for a, b in itertools.pairwise(sample.times)]
    per_second = 1 / run.seconds if run.seconds else 0.0
    return Summary(
        requests=len(run.samples),
        failed=len(run.samples) - len(good),
        errors=dict(Counter(s.error for s in run.samples if s.error is not None)),
        seconds=run.seconds,
        late_ms=1000 * run.late_seconds,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        ttft_ms=quantiles([sample.ttft for sample in good]),
        itl_ms=quantiles(gaps),
        events_per_token=sum(len(s.times) for s in good) / max(1, output_tokens),
        tpot_ms=quantiles([s.tpot for s in good if s.tpot is not None]),
        e2e_ms=quantiles([sample.ended_at - sample.sent_at for sample in good]),
        requests_per_second=len(good) * per_second,
        output_tokens_per_second=output_tokens * per_second,
        total_tokens_per_second=(prompt_tokens + output_tokens) * per_second,
        goodput_requests_per_second=kept * per_second,
        good_share=kept / len(run.samples) if run.samples else 0.0,
    )


def quantiles(seconds: Sequence[float]) -> Quantiles:
    """Of values in seconds; each one is a value that was measured (nearest rank)."""
    if not seconds:
        return Quantiles()
    ordered = sorted(1000 * value for value in seconds)

    def at(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return Quantiles(at(0.5), at(0.9), at(0.99), ordered[-1])


def _or_inf(limit: float | None) -> float:
    return math.inf if limit is None else limit
