"""`pdrt bench` against an endpoint that does as the test says, and its arithmetic."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.cli.bench.client import Sample, Target, parse_target, send
from pdrt.cli.bench.command import measure
from pdrt.cli.bench.flags import parser, settings_of
from pdrt.cli.bench.load import Run, Shape, chat_body, closed_loop, completion_body, poisson_times
from pdrt.cli.bench.machine import CpuTimes, cpu_shares, cpu_times
from pdrt.cli.bench.report import table, write_json
from pdrt.cli.bench.summary import Slo, quantiles, summarize
from pdrt.errors import ConfigError

Answer = Callable[[dict[str, Any]], bytes]
SECONDS_MAX = 120.0


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


COUNTS = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
USAGE = {"usage": COUNTS, "choices": []}
STREAM = [event("a"), event(""), event("b"), event("é"), b"data: " + json.dumps(USAGE).encode()]
STREAM += [b"\n\n", b"data: [DONE]\n\n"]
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
PLAIN = OK + b"\r\n" + b"".join(STREAM)


def chunked(pieces: list[bytes]) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return OK + b"transfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


class Endpoint:
    """Answers every POST with what `answer` makes of its body."""

    def __init__(self) -> None:
        self.answer: Answer = lambda body: PLAIN
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.running = self.running_max = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length)) if length else {}
        self.heads.append(head)
        self.bodies.append(body)
        writer.write(self.answer(body))
        self.running -= 1
        writer.close()


@pytest.fixture
async def endpoint() -> AsyncIterator[tuple[Endpoint, Target]]:
    made = Endpoint()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield made, parse_target(f"http://127.0.0.1:{port}", "the-key", "completions", SECONDS_MAX)
    server.close()


@pytest.mark.parametrize(
    "answer",
    [
        PLAIN,
        chunked(STREAM),
        chunked([b"".join(STREAM)]),
        chunked([bytes([byte]) for byte in b"".join(STREAM)]),
    ],
    ids=["until_close", "a_chunk_per_event", "one_chunk", "a_chunk_per_byte"],
)
async def test_events_are_found_however_they_are_framed(
    endpoint: tuple[Endpoint, Target], answer: bytes
) -> None:
    made, target = endpoint
    made.answer = lambda body: answer
    sample = await send(target, {"prompt": [1]})
    assert sample.error is None
    assert len(sample.times) == 3, "events without text are no tokens"
    assert (sample.prompt_tokens, sample.output_tokens, sample.cached_tokens) == (5, 3, 2)
    assert sample.sent_at <= sample.times[0] <= sample.times[-1] <= sample.ended_at
    assert "Authorization: Bearer the-key" in made.heads[0]


async def test_chat_events(endpoint: tuple[Endpoint, Target]) -> None:
    made, target = endpoint
    deltas = [{"role": "assistant"}, {"reasoning_content": "hm"}, {"content": "yes"}, {}]
    events = [b"data: %s\n\n" % json.dumps({"choices": [{"delta": d}]}).encode() for d in deltas]
    made.answer = lambda body: OK + b"\r\n" + b"".join(events)
    sample = await send(target, {})
    assert (sample.error, len(sample.times), sample.output_tokens) == (None, 2, 2)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b'HTTP/1.1 429 Busy\r\n\r\n{"error": {"code": "overloaded"}}', "429 overloaded"),
        (b"HTTP/1.1 500 Oops\r\n\r\nnot json", "500"),
        (OK + b"\r\n" + event("a") + b'data: {"error": {"type": "failed"}}\n\n', "failed"),
        (OK + b"\r\ndata: nonsense\n\n", "JSONDecodeError"),
        (OK + b"\r\ndata: [DONE]\n\n", "no text"),
        (b"", "EOFError"),
        (chunked(STREAM)[:-40], None),
        (OK + b'\r\ndata: {"choices": ["a"]}\n\n', "ValueError"),
        (OK + b'\r\ndata: {"choices": 5}\n\n', "ValueError"),
        (OK + b'\r\ndata: {"choices": [{"delta": "a"}]}\n\n', "ValueError"),
        (OK + b'\r\ndata: {"usage": [1]}\n\n', "ValueError"),
        (OK + b'\r\ndata: {"usage": {"prompt_tokens": {}}}\n\n', "ValueError"),
    ],
    ids=[
        "refused",
        "broken",
        "in_the_stream",
        "nonsense",
        "nothing",
        "closed",
        "cut",
        "choice",
        "choices",
        "delta",
        "usage",
        "count",
    ],
)
async def test_failures_are_samples(
    endpoint: tuple[Endpoint, Target], answer: bytes, error: str | None
) -> None:
    made, target = endpoint
    made.answer = lambda body: answer
    sample = await send(target, {})
    assert sample.error is not None
    assert error is None or sample.error == error


async def test_nobody_there() -> None:
    target = parse_target("http://127.0.0.1:1", None, "completions", SECONDS_MAX)
    assert (await send(target, {})).error == "ConnectionRefusedError"


async def test_the_closed_loop_keeps_its_concurrency() -> None:
    running = most = 0

    async def slow(body: dict[str, Any]) -> Sample:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return Sample(0.0, 1.0, (0.5,))

    run = await closed_loop(slow, [{} for _ in range(20)], 4)
    assert (len(run.samples), most) == (20, 4)


def test_poisson_arrivals_have_the_rate_asked_for() -> None:
    times = poisson_times(50.0, 20_000, random.Random(1))
    assert times[0] == 0.0
    assert times == sorted(times)
    assert 20_000 / times[-1] == pytest.approx(50.0, rel=0.03)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.05), "as of an exponential distribution"


def test_prompts_do_not_begin_alike() -> None:
    shape, draw = Shape("m", 32, 8, 10_000, True), random.Random(0)
    bodies = [completion_body(shape, draw) for _ in range(50)]
    assert len({tuple(body["prompt"][:4]) for body in bodies}) == 50
    assert all(len(body["prompt"]) == 32 for body in bodies)
    assert all(100 <= token < 10_000 for body in bodies for token in body["prompt"])
    assert bodies[0]["ignore_eos"] is True
    chat = chat_body(Shape("m", 32, 8, 10_000, False), draw)
    assert "ignore_eos" not in chat
    assert len(chat["messages"][0]["content"].split()) == 32


def test_the_figures_of_a_run() -> None:
    good = Sample(0.0, 1.3, (0.1, 0.2, 0.4), prompt_tokens=10, output_tokens=3)
    slow = Sample(0.0, 2.0, (1.0, 2.0), prompt_tokens=10, output_tokens=2)
    failed = Sample(0.0, 0.1, error="429")
    found = summarize(Run((good, slow, failed), 2.0, 0.25), Slo(0.5, 0.2))
    assert (found.requests, found.failed, found.errors) == (3, 1, {"429": 1})
    assert found.ttft_ms.p50 == pytest.approx(100)
    assert found.ttft_ms.max == pytest.approx(1000)
    assert found.itl_ms.max == pytest.approx(1000)
    assert found.tpot_ms.p50 == pytest.approx(150)
    assert found.events_per_token == pytest.approx(1.0)
    assert found.output_tokens_per_second == pytest.approx(2.5)
    assert found.total_tokens_per_second == pytest.approx(12.5)
    assert found.requests_per_second == pytest.approx(1.0)
    assert found.goodput_requests_per_second == pytest.approx(0.5), "one of three kept the SLO"
    assert found.good_share == pytest.approx(1 / 3)
    assert found.late_ms == pytest.approx(250)


def test_a_run_in_which_all_failed_has_figures_too() -> None:
    found = summarize(Run((Sample(0.0, 0.1, error="x"),), 1.0), Slo())
    assert (found.failed, found.goodput_requests_per_second, found.ttft_ms.p99) == (1, 0, 0)


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_quantiles_were_measured_and_ascend(values: list[float]) -> None:
    found = quantiles(values)
    measured = {1000 * value for value in values}
    assert found.p50 <= found.p90 <= found.p99 <= found.max == max(measured)
    assert {found.p50, found.p90, found.p99} <= measured


@pytest.mark.parametrize("named", [("pdrt",), ("nobody", "10"), ("10", "VLLM")], ids=str)
def test_processor_time_of_others(tmp_path: Path, named: tuple[str, ...]) -> None:
    def reading(user: int, idle: int, server: int, ended: int) -> CpuTimes:
        (tmp_path / "stat").write_text(f"cpu  {user} 0 0 {idle} 0 0 0 0 0 0\n")
        # The server, half of it in a child that is called something else; and somebody else.
        for pid, parent, command, ticks in (
            (10, 1, "python\0-m\0pdrt\0decode", server // 2),
            (12, 10, "VLLM::Worker", server // 2),
            (11, 1, "make", 7),
        ):
            folder = tmp_path / str(pid)
            folder.mkdir(exist_ok=True)
            (folder / "cmdline").write_text(command)
            of_ended_children = ended if pid == 10 else 0
            counts = map(str, (ticks, 0, of_ended_children, 0))
            fields = " ".join(["S", str(parent), *["0"] * 9, *counts])
            (folder / "stat").write_text(f"{pid} (a) b) {fields} 0\n")
        found = cpu_times(named, tmp_path)
        assert found is not None
        return found

    shares = cpu_shares(reading(100, 100, 50, 1), reading(180, 120, 106, 5))
    assert shares is not None
    assert shares.busy == pytest.approx(80)
    assert shares.others == pytest.approx(20), "of 80 busy ticks 60 were the server's"


def test_where_the_kernel_does_not_say(tmp_path: Path) -> None:
    assert cpu_times(("pdrt",), tmp_path) is None
    assert cpu_shares(None, None) is None


async def test_a_whole_run(endpoint: tuple[Endpoint, Target], tmp_path: Path) -> None:
    made, target = endpoint
    url = f"http://{target.host}:{target.port}/v1"
    arguments = f"--url {url} --api-key secret --model m --requests 6 --warmup 1 --slo-ttft-ms 9e8"
    for load, name in (("--concurrency 3", "c3"), ("--rate 1000", "1000/s")):
        settings = settings_of(parser().parse(f"{arguments} {load}".split()))
        (row,) = await asyncio.to_thread(measure, settings)
        assert (row.load.name, row.summary.requests, row.summary.failed) == (name, 6, 0)
        assert row.summary.good_share == 1.0
        assert table([row], settings.slo).row_count == 1
        write_json(tmp_path / "rows.json", settings, [row])
        text = (tmp_path / "rows.json").read_text()
        assert "secret" not in text
        document = json.loads(text)
        assert document["rows"][0]["summary"]["output_tokens"] == 18
        assert document["rows"][0]["cpu"] is None or document["rows"][0]["cpu"]["others"] >= 0
    assert len(made.bodies) == 2 * (1 + 6), "warm-up requests are sent, not counted"


@pytest.mark.parametrize(
    "arguments",
    [
        "--concurrency 0",
        "--rate -1",
        "--requests 0",
        "--concurrency 1 --rate 2",
        "--vocabulary 10",
        "--url ftp://x",
        "--url http://[",
        "--rate nan",
    ],
)
def test_what_cannot_be_run_is_refused(arguments: str) -> None:
    with pytest.raises(ConfigError, match="--"):
        settings_of(parser().parse(["--model", "m", *arguments.split()]))
