"""`pdrt status`: tables from whatever document comes, and a clear word when none does."""

from __future__ import annotations

import io
import math
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from pdrt.cli.main import main
from pdrt.cli.status import PIPE_WIDTH, View, _is_screen
from pdrt.cli.status_rates import Histogram, rates
from pdrt.cli.status_tables import ROWS_MAX, pages_bar, render
from pdrt.errors import PdrtError

LEASE = {"room": "d1:7", "state": "revoking", "age_seconds": 6.25, "pages": 3, "reason": "lost"}
DOCUMENT: dict[str, Any] = {
    "ready": False,
    "reasons": ["quarantine bound reached"],
    "gateway": {"incarnation": "00112233445566ff", "requests": 2},
    "workers": [
        {
            "role": "decode",
            "worker": "d1d1d1d1aaaaaaaa",
            "endpoint": "tcp://127.0.0.1:5001",
            "state": "live",
            "fingerprint": {"model": "m"},
            "status": {
                "pages": {"free": 90, "sequence": 1, "cache": 2, "lease": 3, "room": 4},
                "pages_total": 100,
                "rooms": [],
                "leases": [{**LEASE, "room": "d1:8", "state": "granted", "reason": None}],
                "quarantined_pages": 3,
                "quarantine": [LEASE],
                "writers": [
                    {
                        "endpoint": "tcp://127.0.0.1:5002",
                        "worker": "f2f2f2f2bbbbbbbb",
                        "generation": 5,
                        "state": "paired",
                    }
                ],
                "queued": 11,
                "running": 12,
            },
        },
        {
            "role": "prefill",
            "worker": "f2f2f2f2bbbbbbbb",
            "state": "lost",
            "reasons": ["silent too long"],
            "status": {
                "rooms": [{**LEASE, "phase": "computing", "tokens": 77, "computed": 33}],
                "rooms_total": 4321,
                "rooms_by_phase": {"computing": 4000, "transferring": 321, "queued": 0},
            },
        },
    ],
}


def rendered(document: Any) -> str:
    return text_of(render(document, rates(document, document, 1.0)))


def text_of(shown: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=PIPE_WIDTH)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_everything_that_matters_is_shown() -> None:
    text = rendered(DOCUMENT)
    for shown in (
        "not ready",
        "quarantine bound reached",
        "incarnation 00112233 ",
        "d1d1d1d1",
        "tcp://127.0.0.1:5001",
        "silent too long",
        "4321",
        "90",
        "f2f2f2f2",
        "granted",
        "6.2 s",
        "4000 computing, 321 transferring",
        "33 of 77",
    ):
        assert shown in text, text
    assert "d1d1d1d1a" not in text


RANKS = [
    {"rank": 0, "pid": 4711, "state": "serving", "heard_seconds": 0.0, "device": "cuda:2",
     "engine_bytes": {"local": 3 * 2**30, "tcp": 1536}},
    {"rank": 1, "pid": 4712, "state": "silent", "heard_seconds": 4.2, "device": "cores 4-7",
     "engine_bytes": {}, "refused_peers": {"stale": 3}, "refused_writes": {"outside": 1}},
]  # fmt: skip


def test_every_rank_is_shown() -> None:
    text = rendered({"workers": [{**DOCUMENT["workers"][0], "status": {"ranks": RANKS}}]})
    for shown in (
        "4711", "cuda:2", "serving", "local 3 GiB, tcp 1.5 KiB", "4712", "cores 4-7",
        "silent 4 s", "3 connections refused: stale; 1 writes refused: outside",
    ):  # fmt: skip
        assert shown in text, text


def test_a_pair_says_its_engine_and_why_it_is_no_better_one() -> None:
    writer = {
        "worker": "f2f2f2f2bbbbbbbb", "state": "paired", "engine": "tcp",
        "passed_over": ["local: cannot open the pool", "mooncake: decode does not offer it"],
    }  # fmt: skip
    text = rendered({"workers": [{**DOCUMENT["workers"][0], "status": {"writers": [writer]}}]})
    assert "tcp" in text
    assert "local: cannot open the pool; mooncake: decode does not offer it" in " ".join(
        text.split()
    ), text


def test_a_long_list_is_cut_and_counted() -> None:
    worker = {**DOCUMENT["workers"][0], "status": {"leases": [LEASE] * (ROWS_MAX + 7)}}
    assert "and 7 more" in rendered({"workers": [worker]})


def test_without_workers_it_says_what_to_start() -> None:
    assert "pdrt prefill" in rendered({"ready": False})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "ready",
                    "reasons",
                    "gateway",
                    "workers",
                    "status",
                    "pages",
                    "leases",
                    "ranks",
                    "refused_peers",
                    "engine_bytes",
                    "totals",
                    "histograms",
                    "ttft_seconds",
                    "output_tokens",
                    "bounds",
                    "counts",
                    "sum",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["reasons", "gateway", "workers", "ready"]), json_values))
def test_no_document_crashes_it(document: dict[str, Any]) -> None:
    rendered(document)


def served(tokens: float, itl: list[int], incarnation: str = "00g1") -> dict[str, Any]:
    histogram = {"bounds": [0.01, 0.1, 1.0], "counts": itl, "sum": float(sum(itl))}
    totals = {"output_tokens": tokens, "histograms": {"itl_seconds": histogram}}
    steps = {"bounds": [8.0], "counts": [0, 1], "sum": tokens}
    worker = {
        "role": "decode",
        "worker": "00d1",
        "status": {"totals": {"histograms": {"step_tokens": steps}}},
    }
    return {"gateway": {"incarnation": incarnation, "totals": totals}, "workers": [worker]}


def test_speed_is_what_grew_between_two_looks() -> None:
    before, after = served(1000, [100, 0, 0, 0]), served(1600, [100, 50, 0, 0])
    found = rates(after, before, 4.0)
    assert found.facts == ("output tokens/s 150.0", "ITL p50 55 ms p99 99 ms")
    assert found.span == "last 4 s"
    assert found.workers["00d1"].tokens_per_second == "150"


def test_before_a_second_look_quantiles_are_since_the_start() -> None:
    found = rates(served(1000, [100, 0, 0, 0]))
    assert (found.span, found.facts) == ("since start", ("ITL p50 5 ms p99 10 ms",))


def test_a_gateway_that_was_restarted_has_not_served_backwards() -> None:
    found = rates(served(10, [2, 0, 0, 0], "00g2"), served(1000, [100, 0, 0, 0], "00g1"), 4.0)
    assert (found.span, found.facts) == ("since start", ("ITL p50 5 ms p99 10 ms",))


@given(st.lists(st.integers(0, 5), min_size=4, max_size=4), st.floats(0, 1))
def test_a_quantile_lies_within_the_bucket_that_holds_it(counts: list[int], share: float) -> None:
    histogram = Histogram((0.01, 0.1, 1.0), tuple(counts), 0.0)
    found = histogram.quantile(share)
    values = [
        bound for bound, n in zip((0.01, 0.1, 1.0, 9.0), counts, strict=True) for _ in range(n)
    ]
    if not values:
        assert found is None
        return
    exact = values[max(0, math.ceil(share * len(values)) - 1)]
    below = {0.01: 0.0, 0.1: 0.01, 1.0: 0.1, 9.0: 1.0}[exact]
    assert found is not None
    assert below <= found <= min(exact, 1.0)


@given(
    st.fixed_dictionaries(
        {o: st.integers(0, 1000) for o in ("free", "sequence", "cache", "lease", "room")}
    ),
    st.integers(0, 1200),
)
def test_a_bar_is_full_and_shows_every_owner(pages: dict[str, int], quarantined: int) -> None:
    bar = pages_bar(pages, quarantined).plain
    assert len(bar) == (32 if sum(pages.values()) else 0)
    busy = {o: n for o, n in pages.items() if n and o not in ("free", "lease")}
    shown = {"sequence": "█", "room": "▒", "cache": "░"}
    assert all(shown[owner] in bar for owner in busy)
    assert ("!" in bar) == bool(min(quarantined, pages["lease"]))


def test_a_gateway_that_goes_away_is_waited_for() -> None:
    answers: list[Any] = [PdrtError("nothing answers"), served(1000, [9, 0, 0, 0])]

    def fetch() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    view = View(served(500, [0, 0, 0, 0]), 0.0)
    view.look(fetch, 5.0)
    assert view.line() == {"error": "nothing answers"}
    assert text_of(view.shown()).startswith("nothing answers\n")
    view.look(fetch, 10.0)
    assert "output tokens/s 50.0" in text_of(view.shown()), "over the whole time between"
    assert view.line() == served(1000, [9, 0, 0, 0])


@pytest.mark.parametrize("seconds", ["0", "nan", "soon", "1e9"])
def test_a_pace_that_is_none_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", f"--watch={seconds}"]) == 2
    assert "--watch" in capsys.readouterr().err


def test_nothing_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert main(["status", "--url", f"http://127.0.0.1:{port}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"pdrt: nothing answers at http://127.0.0.1:{port} (")
    assert "pdrt up" in error


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://[::1", "http://"])
def test_a_url_that_is_none_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", url]) == 2
    assert "is not an http://" in capsys.readouterr().err


@pytest.mark.parametrize(("term", "is_screen"), [("xterm", True), ("dumb", False)])
def test_a_dumb_terminal_gets_one_look_after_the_other(
    term: str, is_screen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    assert _is_screen(Console(force_terminal=True)) is is_screen
