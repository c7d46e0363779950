"""Roles that start in any order, join, and leave at run time."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import openai
import pytest

from tests.e2e.clients import complete
from tests.e2e.conftest import TINY_FLAGS, Cluster
from tests.e2e.deployment import Deployment, until
from tests.e2e.reference import Reference, words
from tests.e2e.streams import Streams, assert_serves

pytestmark = pytest.mark.e2e


ALONE_NEVER = (*TINY_FLAGS, "--local-prefill", "off")
"""Of decode workers that serve only in a pair."""


async def test_decode_first_and_the_gateway_last(
    tmp_path: Path, tiny_model: Path, tiny_reference: Reference
) -> None:
    """Who finds no gateway says so and goes on trying; a gateway without workers says 503."""
    with Deployment(tmp_path, str(tiny_model)) as deployment:
        # Wide pages on one side: these two are never paired.
        decode = deployment.decode("decode-0", *ALONE_NEVER, "--page-size", "32")
        assert decode.incarnation
        prefill = deployment.prefill("prefill-0", *TINY_FLAGS)
        for process in (decode, prefill):
            await asyncio.to_thread(process.wait_for, "no gateway answers; still trying")
        deployment.gateway()
        await until(lambda: len(deployment.workers()) == 2, "both to register")
        await assert_never_paired(deployment, "page_size", "16", "32")
        # The right one joins.
        deployment.decode("decode-1", *ALONE_NEVER)
        await until(deployment.is_ready, "ready")
        await assert_serves(deployment, tiny_reference)
        deployment.processes["decode-0"].kill()
        deployment.decode("decode-0", *ALONE_NEVER, "--dtype", "bfloat16")
        deployment.processes["decode-1"].kill()
        await until(lambda: not deployment.is_ready(), "the right one to be lost")
        await assert_never_paired(deployment, "dtype", "float32", "bfloat16")


async def assert_never_paired(deployment: Deployment, field: str, ours: str, theirs: str) -> None:
    """The reasons name both values, and a client learns that nobody can serve it."""

    def look() -> list[str]:
        reasons = deployment.reasons() or []
        return [r for r in reasons if field in r and ours in r and theirs in r]

    await until(look, f"{field} {ours} and {theirs} in the reasons")
    async with deployment.client() as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await complete(client, deployment.name, [5], max_tokens=1)
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert field in caught.value.message


async def test_all_that_joined_are_used(cluster: Cluster, tiny_reference: Reference) -> None:
    def bytes_written() -> dict[str, float]:
        return {
            labels["worker"]: value
            for name, labels, value in cluster.metrics()
            if name == "pdrt_transfer_bytes_total"
        }

    before = bytes_written()
    async with Streams(cluster) as streams:
        await streams.begin([words(tiny_reference, 40, seed=n) for n in range(12)])
    streams.assert_unharmed(tiny_reference)
    await until(lambda: not cluster.troubles(), "whole")
    after = bytes_written()
    assert len(after) == 4
    assert all(value > before.get(worker, 0) for worker, value in after.items())


@pytest.mark.parametrize("name", ("decode-1", "prefill-1"))
async def test_one_leaves_without_losing_requests(
    cluster: Cluster, tiny_reference: Reference, name: str
) -> None:
    """SIGTERM: it takes nothing new, ends what it has, and exits; others are not disturbed."""
    async with Streams(cluster) as streams:
        await streams.begin([words(tiny_reference, 40, seed=n) for n in range(6)])
        process = cluster.processes[name]
        process.send(signal.SIGTERM)
        # These meet a worker that is leaving, or has left.
        await streams.begin([words(tiny_reference, 200, seed=n) for n in range(6, 12)])
        assert await asyncio.to_thread(process.wait) == 0
    streams.assert_unharmed(tiny_reference)
    await until(lambda: len(cluster.workers()) == 3 and cluster.is_ready(), "one fewer")
    await assert_serves(cluster, tiny_reference)


async def test_two_gateways(cluster: Cluster, tiny_reference: Reference) -> None:
    """All workers dial a second one, which was not there: it comes, serves, and vanishes."""
    missing = f"no gateway answers.*gateway=127.0.0.1:{cluster.second_worker_port}"
    for name, process in cluster.processes.items():
        if name != "gateway":
            await asyncio.to_thread(process.wait_for, missing)
    with Deployment(cluster.folder / "second", cluster.model) as second:
        second.port, second.worker_port = cluster.second_port, cluster.second_worker_port
        second.gateway()
        await until(lambda: len(second.workers()) == 4 and second.is_ready(), "all to register")
        prompts = [words(tiny_reference, 30, seed=n) for n in range(4)]
        async with Streams(cluster) as streams, Streams(second) as other_streams:
            await streams.begin(prompts)
            await other_streams.begin(prompts)
        streams.assert_unharmed(tiny_reference)
        other_streams.assert_unharmed(tiny_reference)
    await assert_serves(cluster, tiny_reference)
