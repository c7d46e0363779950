"""What must be reached: one table, and how figures are held against it. Pure.

A bar is kept only by figures that are there and were taken while nobody else used the machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec


class Direction(Enum):
    AT_MOST = "<="
    AT_LEAST = ">="


class Verdict(Enum):
    KEPT = "kept"
    SHORT = "SHORT"
    UNCLEAN = "UNCLEAN"
    """Others used the processors whenever it was taken: it says nothing, so it passes nothing."""
    MISSING = "MISSING"
    """The benchmark ran, and has no such figure."""
    NOT_RUN = "not run"
    """There is no file of that benchmark, or none of the peer's."""


FAILING = (Verdict.SHORT, Verdict.UNCLEAN, Verdict.MISSING)


class Document(msgspec.Struct, frozen=True):
    """What of a benchmark's JSON bars look at."""

    benchmark: str
    figures: dict[str, float | None]
    """`row.figure` to its value."""
    unclean: tuple[str, ...] = ()
    """Rows that others disturbed."""


class Bar(msgspec.Struct, frozen=True):
    """A limit on one figure of one benchmark; on its ratio to the peer's if `against_peer`."""

    name: str
    benchmark: str
    figure: str
    limit: float
    unit: str = "x"
    direction: Direction = Direction.AT_MOST
    against_peer: bool = False

    @property
    def row(self) -> str:
        return self.figure.partition(".")[0]


class Result(msgspec.Struct, frozen=True):
    """A bar, and what came of it."""

    bar: Bar
    verdict: Verdict
    value: float | None


def _peer(name: str, figure: str, limit: float, direction: Direction = Direction.AT_MOST) -> Bar:
    return Bar(f"{name}, to the peer's", "serve", figure, limit, "x", direction, against_peer=True)


def _transfer(name: str, figure: str, limit: float) -> Bar:
    return Bar(name, "transfer", figure, limit, "x", Direction.AT_LEAST)


BARS = (
    _peer("TTFT, 256 tokens, 1 client", "c1_256.ttft_p50_ms", 0.80),
    _peer("TTFT, 1,500 tokens, 1 client", "c1_1500.ttft_p50_ms", 0.85),
    _peer("ITL, 256 tokens, 1 client", "c1_256.itl_p50_ms", 0.90),
    _peer("ITL, 1,500 tokens, 1 client", "c1_1500.itl_p50_ms", 0.85),
    _peer(
        "output tokens/s, 8 clients", "c8_256.output_tokens_per_second", 1.6, Direction.AT_LEAST
    ),
    _peer("TTFT p50, 8 clients", "c8_256.ttft_p50_ms", 0.70),
    _peer("ITL p99 of 8 streams, long prompts arriving", "mixed.itl_p99_ms", 0.7),
    Bar("the same, to our own with none arriving", "serve", "mixed.itl_p99_to_alone", 1.3),
    Bar("TTFT less 5 ms, to the bare executor, 256", "serve", "bare_256.ttft_to_executor", 1.08),
    Bar("TTFT less 5 ms, to the bare executor, 1,500", "serve", "bare_1500.ttft_to_executor", 1.08),
    Bar("TTFT of a prompt that shares 1,400, to the first", "serve", "prefix.ttft_to_first", 0.15),
    Bar("pages computed beyond the missing ones", "serve", "prefix.pages_computed", 0, "pages"),
    Bar("pages sent beyond the missing ones", "serve", "prefix.pages_sent", 0, "pages"),
    Bar("memory per worker beyond weights and pool", "serve", "memory.worker_max_mb", 600, "MB"),
    Bar("warm start, up to ready", "serve", "start.ready_seconds", 10, "s"),
    Bar("decode step, batch 1, to its floor", "executor", "decode_1.to_floor", 1.9),
    Bar("decode step, batch 8, to its floor", "executor", "decode_8.to_floor", 1.9),
    Bar("decode step, batch 32, to its floor", "executor", "decode_32.to_floor", 2.2),
    Bar("prefill of 1,500 tokens, to its floor", "executor", "prefill_1500.to_floor", 1.5),
    Bar("context 256 to 4,096: time to bytes", "executor", "decode_8_long.added_to_floor", 2.5),
    Bar("control per decode step, batch 64", "control", "batch_64.step_ms", 0.5, "ms"),
    Bar("gateway CPU per token, 256 streams", "gateway", "streams.cpu_us_per_token", 60, "us"),
    Bar(
        "streams that end while one client does not read",
        "gateway",
        "unread.share_ended",
        1.0,
        "of 1",
        Direction.AT_LEAST,
    ),
    *(_transfer(f"local, runs of {size}, to memcpy", f"local_{size}.to_memcpy", 0.90)
      for size in ("368k", "2m")),
    *(_transfer(f"tcp, runs of {size}, to bare sockets", f"tcp_{size}.to_raw", 0.80)
      for size in ("64k", "368k", "2m")),
    *(_transfer(f"tcp, runs of {size}, to mooncake over TCP", f"tcp_{size}.to_mooncake", 1.0)
      for size in ("12k", "64k", "368k", "2m")),
    *(_transfer(f"mooncake, runs of {size}, to its sync call", f"mooncake_{size}.to_sync", 1.5)
      for size in ("64k", "368k", "2m")),
    *(Bar(f"{engine}, TP {name}, seconds per byte to 1to1", "transfer",
          f"{engine}_prompt.{name}_to_matched", 1.15)
      for engine in ("local", "tcp", "mooncake") for name in ("2to1", "1to2")),
    Bar("control of one hand-over", "transfer", "control.handover_ms", 1.0, "ms"),
)  # fmt: skip


def judge(
    bars: Sequence[Bar], documents: Mapping[str, Document], peer: Document | None
) -> list[Result]:
    """Each bar against the document of its benchmark. `documents`: by benchmark."""
    return [_judge(bar, documents.get(bar.benchmark), peer) for bar in bars]


def _judge(bar: Bar, own: Document | None, peer: Document | None) -> Result:
    if own is None or (bar.against_peer and peer is None):
        return Result(bar, Verdict.NOT_RUN, None)
    value = _number(own.figures.get(bar.figure))
    sources = [own]
    if bar.against_peer:
        assert peer is not None
        sources.append(peer)
        value = _ratio(value, _number(peer.figures.get(bar.figure)))
    if value is None:
        return Result(bar, Verdict.MISSING, None)
    if any(bar.row in source.unclean for source in sources):
        return Result(bar, Verdict.UNCLEAN, value)
    is_kept = value <= bar.limit if bar.direction is Direction.AT_MOST else value >= bar.limit
    return Result(bar, Verdict.KEPT if is_kept else Verdict.SHORT, value)


def _number(value: float | None) -> float | None:
    """None for what is no figure: a NaN would be neither above nor below a limit."""
    return value if value is not None and math.isfinite(value) else None


def _ratio(value: float | None, base: float | None) -> float | None:
    """Of times and rates. None where one is 0: nothing was measured then."""
    return value / base if value and base else None


def is_failed(results: Sequence[Result]) -> bool:
    return any(result.verdict in FAILING for result in results)


def lines(results: Sequence[Result]) -> list[str]:
    """For people: each bar with its figure, and a sum."""
    shown = []
    for result in results:
        bar = result.bar
        value = "-" if result.value is None else f"{result.value:.4g} {bar.unit}"
        limit = f"{bar.direction.value} {bar.limit:g} {bar.unit}"
        shown.append(f"{bar.name:60}{value:>14}  {limit:14}  {result.verdict.value}")
    counts = [(verdict, sum(r.verdict is verdict for r in results)) for verdict in Verdict]
    shown.append(", ".join(f"{count} {verdict.value}" for verdict, count in counts if count))
    return shown
