"""`pdrt status`: tables from whatever document comes, and a clear word when none does."""

from __future__ import annotations

import io
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pdrt.cli.main import main
from pdrt.cli.status import ROWS_MAX, render

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
            "status": {"rooms": [LEASE], "rooms_total": 4321},
        },
    ],
}


def rendered(document: Any) -> str:
    console = Console(file=io.StringIO(), width=120)
    render(document, console)
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
    ):
        assert shown in text, text
    assert "d1d1d1d1a" not in text


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
                ["ready", "reasons", "gateway", "workers", "status", "pages", "leases"]
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


def test_nothing_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert main(["status", "--url", f"http://127.0.0.1:{port}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"pdrt: nothing answers at http://127.0.0.1:{port} (")
    assert "pdrt up" in error


def test_a_url_without_a_scheme_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", "127.0.0.1:8000"]) == 2
    assert "is not an http://" in capsys.readouterr().err
