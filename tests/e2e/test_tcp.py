"""Hand-overs through the tcp engine: `pdrt up --transfer tcp`, and roles started one by one."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.clients import complete
from tests.e2e.conftest import TINY_FLAGS
from tests.e2e.deployment import HANG_SECONDS, Deployment, until
from tests.e2e.reference import Reference, words
from tests.e2e.streams import LONG_PROMPT_TOKENS, Streams, assert_serves

pytestmark = pytest.mark.e2e

FLAGS = (*TINY_FLAGS, "--transfer", "tcp", "--local-prefill", "off")
ABORTS = 24
SHARED_OUT_BY_UP = ("--silence-seconds", "3")
"""A dead writer is noticed by its silence here, not by its pidfd."""


@pytest.fixture(scope="module")
def _tcp(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("tcp"), str(tiny_model)) as deployment:
        deployment.up(*FLAGS, *SHARED_OUT_BY_UP)
        deployment.wait_ready()
        yield deployment
        deployment.assert_holds_nothing_named()


@pytest.fixture
def tcp(_tcp: Deployment) -> Iterator[Deployment]:
    """Ready before every test, and whole after it."""
    _tcp.wait_ready()
    yield _tcp
    _tcp.wait_whole()


def bytes_by_engine(deployment: Deployment, role: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, labels, value in deployment.metrics():
        if name == "pdrt_transfer_bytes_total" and labels["role"] == role:
            found[labels["engine"]] = found.get(labels["engine"], 0.0) + value
    return found


async def test_answers_are_right_and_the_engine_is_told(
    tcp: Deployment, tiny_reference: Reference
) -> None:
    async with Streams(tcp) as streams:
        await streams.begin([words(tiny_reference, 300, seed=n) for n in range(8)])
    streams.assert_unharmed(tiny_reference)
    for role in ("prefill", "decode"):
        assert bytes_by_engine(tcp, role).keys() == {"tcp"}
    assert tcp.metric("pdrt_writers", engine="tcp") == 1
    [decode] = tcp.reports("decode")
    [writer] = decode["writers"]
    assert (writer["state"], writer["engine"]) == ("paired", "tcp")
    assert writer["passed_over"] == [
        "local: decode and prefill do not offer it",
        "mooncake: decode and prefill do not offer it",
    ]
    tcp.processes["up"].wait_for("a prefill worker writes here")


async def test_clients_that_leave_while_pages_are_on_their_way(
    tcp: Deployment, tiny_reference: Reference
) -> None:
    """At any moment between grant and first token: both pools come back, without a fence."""
    chance = random.Random(7)
    fences, refused = (tcp.metric(f"pdrt_{n}_total") for n in ("fences", "refused_writes"))
    async with tcp.client() as client, asyncio.timeout(HANG_SECONDS):
        for number in range(ABORTS):
            prompt = words(tiny_reference, 1500, seed=100 + number)
            task = asyncio.create_task(complete(client, tcp.name, prompt, max_tokens=5))
            await asyncio.sleep(chance.random() * 0.3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not tcp.troubles(), "whole")
    assert tcp.metric("pdrt_fences_total") == fences
    assert tcp.metric("pdrt_refused_writes_total") == refused
    await assert_serves(tcp, tiny_reference)


async def test_a_writer_that_dies_is_fenced_by_its_generation(
    tcp: Deployment, tiny_reference: Reference
) -> None:
    """Its requests go on with its successor, and what it was writing comes back."""
    prompt = words(tiny_reference, LONG_PROMPT_TOKENS, seed=5)
    fences = tcp.metric("pdrt_fences_total", engine="tcp")
    async with tcp.client() as client, asyncio.timeout(HANG_SECONDS):
        task = asyncio.create_task(complete(client, tcp.name, prompt, max_tokens=5))
        await until(tcp.in_prefill, "the first chunks")
        pid = tcp.pid_of("prefill")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        answer = await task
    tiny_reference.assert_greedy(prompt, answer.text, 5, 5)
    await until(lambda: not tcp.troubles(), "whole")
    assert tcp.metric("pdrt_fences_total", engine="tcp") == fences + 1
    await assert_serves(tcp, tiny_reference)


async def test_roles_that_join_one_by_one(tcp: Deployment, tiny_reference: Reference) -> None:
    """A pair with an engine in common is one; who has another one is refused with both lists."""
    tcp.prefill("prefill-local", *TINY_FLAGS, "--transfer", "local")
    tcp.decode("decode-tcp", *FLAGS)

    def refusals() -> list[str]:
        return [text for worker in tcp.workers("decode") for text in worker["refused"]]

    await until(lambda: len(refusals()) == 2, "both decode workers to refuse it")
    for text in refusals():
        assert "decode offers tcp, prefill has local" in text
    wanted = tcp.processes["decode-tcp"].incarnation

    def is_paired() -> bool:
        return any(w["worker"] == wanted and w["paired"] for w in tcp.workers("decode"))

    await until(is_paired, "the pair that fits")
    async with Streams(tcp) as streams:
        await streams.begin([words(tiny_reference, 100, seed=50 + n) for n in range(8)])
    streams.assert_unharmed(tiny_reference)
    for name in ("prefill-local", "decode-tcp"):
        process = tcp.processes.pop(name)
        process.send(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait) == 0
        process.close()
