"""Workers of two ranks each under `pdrt up`: what they answer is what one process alone says, also
beside a worker of one rank, and a rank that dies costs its worker one restart."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clients import complete
from tests.e2e.conftest import TINY_FLAGS
from tests.e2e.deployment import Deployment, is_alive, until, wait
from tests.e2e.reference import Reference, words
from tests.e2e.streams import Streams

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("parallel"), str(tiny_model)) as deployment:
        deployment.up(*TINY_FLAGS, "--tensor-parallel-size", "2")
        deployment.wait_ready()
        yield deployment
        deployment.wait_whole()
        deployment.assert_holds_nothing_named()
        deployment.processes["up"].send(signal.SIGTERM)
        assert deployment.processes["up"].wait() == 0


def ranks_of(deployment: Deployment, role: str) -> list[dict[str, Any]]:
    """Of its one worker, once that has reported them."""

    def look() -> list[dict[str, Any]] | None:
        found = deployment.reports(role)
        return found[0]["ranks"] if len(found) == 1 else None

    return wait(look, f"the ranks of {role}")


async def answers(deployment: Deployment, reference: Reference, seed: int) -> None:
    """Of prompts that end within a page, at its end, and after several chunks."""
    async with deployment.client() as client:
        for length in (1, 16, 50, 100):
            prompt = words(reference, length, seed + length)
            answer = await complete(client, deployment.name, prompt, max_tokens=8, ignore_eos=True)
            reference.assert_greedy(prompt, answer.text, 8, 8, ignore_eos=True)


async def test_answers_are_those_of_one_rank(
    parallel: Deployment, tiny_reference: Reference
) -> None:
    for role in ("prefill", "decode"):
        ranks = ranks_of(parallel, role)
        assert [entry["rank"] for entry in ranks] == [0, 1]
        assert all(is_alive(entry["pid"]) for entry in ranks)
    await answers(parallel, tiny_reference, 1)
    for rank in ("0", "1"):
        assert parallel.metric("pdrt_transfer_bytes_total", role="prefill", rank=rank) > 0


async def test_a_pair_of_unlike_sizes(parallel: Deployment, tiny_reference: Reference) -> None:
    """A decode worker of one rank joins, and reads what two have computed."""
    process = parallel.decode("alone", *TINY_FLAGS, "--local-prefill", "off")
    joined = await asyncio.to_thread(lambda: process.incarnation)

    def is_paired() -> bool:
        return any(w["worker"] == joined and w["paired"] for w in parallel.workers("decode"))

    await until(is_paired, "the pair")
    async with Streams(parallel) as streams:
        await streams.begin([words(tiny_reference, 100, seed=2000 + n) for n in range(8)])
    streams.assert_unharmed(tiny_reference)
    assert parallel.metric("pdrt_transfer_bytes_total", role="decode", worker=joined) > 0
    process.send(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait) == 0
    parallel.processes.pop("alone").close()


async def test_a_rank_that_dies_takes_its_worker_with_it(
    parallel: Deployment, tiny_reference: Reference
) -> None:
    leader, rank = (entry["pid"] for entry in ranks_of(parallel, "decode"))
    os.kill(rank, signal.SIGKILL)
    why = rf"worker ends why=\"rank 1 \(process {rank}\) was killed by SIGKILL\""
    await until(lambda: parallel.processes["up"].wait_for(why), "its message")
    await until(lambda: not is_alive(leader), "the end of its leader")
    await until(lambda: ranks_of(parallel, "decode")[0]["pid"] != leader, "its successor")
    await until(parallel.is_ready, "ready")
    await answers(parallel, tiny_reference, 1000)
