"""`pdrt drain` against a gateway that answers by script."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pdrt.cli import drain as drain_module
from pdrt.cli.main import main

NAME = "d1d1d1d1aaaaaaaa"


def worker(name: str, role: str = "decode", state: str = "live", **fields: Any) -> dict[str, Any]:
    known = {"endpoint": None, "healthy": True, "paired": ["tcp://h:1"]}
    return {"worker": name, "role": role, "state": state, **known, **fields}


PREFILL = worker("f2f2f2f2bbbbbbbb", "prefill", endpoint="tcp://h:1", paired=[])


class Gateway:
    """Answers `/status` with the documents in turn, the last one for ever."""

    def __init__(self) -> None:
        self.documents: list[list[dict[str, Any]]] = [[PREFILL, worker(NAME)]]
        self.answer: tuple[int, Any] = (200, {"role": "decode", "worker": NAME, "state": "live"})
        self.posts: list[tuple[str, str | None]] = []
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                documents = gateway.documents
                workers = documents.pop(0) if len(documents) > 1 else documents[0]
                self.say(200, {"ready": True, "workers": workers})

            def do_POST(self) -> None:
                gateway.posts.append((self.path, self.headers.get("authorization")))
                self.say(*gateway.answer)

            def say(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.setattr(drain_module, "POLL_SECONDS", 0.001)
    made = Gateway()
    monkeypatch.setenv("PDRT_URL", made.url)
    yield made
    made.close()


def test_it_asks_and_does_not_wait(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "d1d1", "--api-key", "k"]) == 0
    assert gateway.posts == [("/workers/d1d1/drain", "Bearer k")]
    assert capsys.readouterr().out.startswith(f"decode {NAME} takes nothing new")


@pytest.mark.parametrize("left", [[PREFILL], [PREFILL, worker(NAME, state="lost")]])
def test_it_waits_until_the_worker_is_gone(
    gateway: Gateway, left: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    before = [PREFILL, worker(NAME)]
    gateway.documents = [before, before, [PREFILL, worker(NAME, state="draining")], left]
    assert main(["drain", NAME, "--wait"]) == 0
    assert capsys.readouterr().out.endswith(f"decode {NAME} is gone\n")
    assert gateway.documents == [left]


def test_it_waits_until_another_serves_in_its_place(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [PREFILL, worker(NAME)]
    started = worker("new", paired=[])
    sick = worker("new", healthy=False)
    after = [PREFILL, worker("new")]
    gateway.documents = [before, [PREFILL], [PREFILL, started], [PREFILL, sick], after]
    assert main(["drain", NAME, "--replaced"]) == 0
    assert capsys.readouterr().out.endswith("1 pairs of workers serve (1 before)\n")
    assert gateway.documents == [after]


@pytest.mark.parametrize(
    ("flags", "left", "said"),
    [
        (("--wait",), [PREFILL, worker(NAME)], "is still there after 0.05 s"),
        (("--replaced",), [PREFILL], "0 pairs of workers serve after 0.05 s, of 1 before"),
    ],
)
def test_waiting_ends(
    gateway: Gateway,
    flags: tuple[str, ...],
    left: list[dict[str, Any]],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gateway.documents = [[PREFILL, worker(NAME)], left]
    assert main(["drain", NAME, "--timeout", "0.05", *flags]) == 1
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((404, {"error": {"message": "No worker"}}), "No worker; `pdrt status` lists the workers"),
        ((409, {"error": {"message": "Any of"}}), "Any of; `pdrt status` lists the workers"),
        ((401, {}), "wants an API key"),
        ((404, "no gateway"), "answered 404: is this a pdrt gateway?"),
    ],
)
def test_refusals_are_one_line(
    gateway: Gateway, answer: tuple[int, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answer = answer
    assert main(["drain", "x/y", "--wait"]) == 2
    assert gateway.posts[0][0] == "/workers/x%2Fy/drain"
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], [NAME, "--timeout", "0"], [NAME, "--timeout", "soon"]])
def test_what_cannot_be_meant(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", *arguments]) == 2
    assert capsys.readouterr().err.startswith("pdrt: ")
