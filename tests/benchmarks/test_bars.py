"""Bars: what passes them, and that nothing passes by not being there."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from bars import BARS, Bar, Direction, Document, Verdict, is_failed, judge, lines

import pdrt

ROOT = Path(pdrt.__file__).parents[1]
OWN = Bar("own", "serve", "row.ms", 10.0, "ms")
PEER = Bar("peer", "serve", "row.rate", 1.6, "x", Direction.AT_LEAST, against_peer=True)


def verdict(bar: Bar, own: Document | None, peer: Document | None = None) -> Verdict:
    documents = {} if own is None else {own.benchmark: own}
    return judge([bar], documents, peer)[0].verdict


def serve(unclean: tuple[str, ...] = (), **figures: float | None) -> Document:
    return Document("serve", {f"row.{name}": value for name, value in figures.items()}, unclean)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (serve(ms=10.0), Verdict.KEPT),
        (serve(ms=10.1), Verdict.SHORT),
        (serve(ms=math.nan), Verdict.MISSING),
        (serve(ms=None), Verdict.MISSING),
        (serve(), Verdict.MISSING),
        (serve(ms=1.0, unclean=("row",)), Verdict.UNCLEAN),
        (serve(ms=1.0, unclean=("another",)), Verdict.KEPT),
        (Document("executor", {"row.ms": 1.0}), Verdict.NOT_RUN),
        (None, Verdict.NOT_RUN),
    ],
)
def test_our_own_figures(own: Document | None, expected: Verdict) -> None:
    assert verdict(OWN, own) is expected


@pytest.mark.parametrize(
    ("own", "peer", "expected"),
    [
        (serve(rate=160.0), serve(rate=100.0), Verdict.KEPT),
        (serve(rate=159.0), serve(rate=100.0), Verdict.SHORT),
        (serve(rate=160.0), serve(), Verdict.MISSING),
        (serve(), serve(rate=100.0), Verdict.MISSING),
        (serve(rate=160.0), serve(rate=0.0), Verdict.MISSING),
        (serve(rate=0.0), serve(rate=100.0), Verdict.MISSING),
        (serve(rate=160.0), serve(rate=100.0, unclean=("row",)), Verdict.UNCLEAN),
        (serve(rate=160.0), None, Verdict.NOT_RUN),
    ],
)
def test_ratios_to_the_peers(own: Document, peer: Document | None, expected: Verdict) -> None:
    assert verdict(PEER, own, peer) is expected


def test_only_what_was_not_run_does_not_fail() -> None:
    failed = {each: is_failed([judge([OWN], {"serve": document}, None)[0]]) for each, document in (
        (Verdict.KEPT, serve(ms=1.0)),
        (Verdict.SHORT, serve(ms=11.0)),
        (Verdict.MISSING, serve()),
        (Verdict.UNCLEAN, serve(ms=1.0, unclean=("row",))),
    )}  # fmt: skip
    assert failed == {verdict: verdict is not Verdict.KEPT for verdict in failed}
    assert not is_failed(judge(BARS, {}, None))


def test_a_time_of_zero_is_kept_where_it_is_a_count() -> None:
    pages = Bar("pages", "serve", "row.pages", 0, "pages")
    assert verdict(pages, serve(pages=0.0)) is Verdict.KEPT
    assert verdict(pages, serve(pages=1.0)) is Verdict.SHORT


def test_every_bar_has_a_line_with_its_verdict() -> None:
    shown = lines(judge(BARS, {}, None))
    assert len(shown) == len(BARS) + 1
    assert all("not run" in line for line in shown)
    assert len({bar.name for bar in BARS}) == len(BARS)


def test_the_command_reads_what_benchmarks_wrote(tmp_path: Path) -> None:
    kept = {bar.figure: bar.limit for bar in BARS if bar.benchmark == "executor"}
    path = tmp_path / "executor.json"
    extra = {"machine": {"cpu": "x"}, "detail": {"rows": []}}
    path.write_text(json.dumps({"benchmark": "executor", "figures": kept, **extra}))
    code, text = check(str(path))
    assert (code, text.count("kept"), text.count("SHORT")) == (0, len(kept) + 1, 0)
    kept["decode_8.to_floor"] += 0.1
    path.write_bytes(msgspec.json.encode(Document("executor", kept)))
    code, text = check(str(path))
    assert code == 1 and text.count("SHORT") == 2, "its line, and the sum"
    code, _ = check(str(path), str(path))
    assert code == 2, "two files of one benchmark"
    code, _ = check(str(tmp_path / "none.json"))
    assert code == 2


def check(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/check.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT)},
    )
    return done.returncode, done.stdout
