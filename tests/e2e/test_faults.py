"""Processes killed, stopped and woken: what clients and both pools see of it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.clients import complete
from tests.e2e.conftest import TINY_FLAGS, Cluster
from tests.e2e.deployment import HANG_SECONDS, Deployment, until
from tests.e2e.reference import Reference, words
from tests.e2e.streams import (
    LASTING_TOKENS,
    LONG_PROMPT_TOKENS,
    Streams,
    assert_serves,
    stream_without_end,
)

pytestmark = pytest.mark.e2e


async def test_prefill_killed_in_the_middle_of_a_prompt(
    cluster: Cluster, tiny_reference: Reference
) -> None:
    prompt = words(tiny_reference, LONG_PROMPT_TOKENS, seed=1)
    before = cluster.metric("pdrt_recomputed_prompt_tokens_total", role="decode")
    async with cluster.client() as client, asyncio.timeout(HANG_SECONDS):
        work = complete(client, cluster.name, prompt, max_tokens=10, ignore_eos=True)
        task = asyncio.create_task(work)
        worker = await until(cluster.in_prefill, "a room in prefill")
        names = ("prefill-0", "prefill-1")
        (name,) = [n for n in names if cluster.processes[n].incarnation == worker]
        cluster.processes[name].kill()
        answer = await task
    tiny_reference.assert_greedy(prompt, answer.text, answer.completion_tokens, 10, ignore_eos=True)
    assert cluster.metric("pdrt_recomputed_prompt_tokens_total", role="decode") > before


async def test_the_only_prefill_worker_killed_in_the_middle_of_a_prompt(
    tiny_up: Deployment, tiny_reference: Reference
) -> None:
    """A client that comes back when it is told to has its answer after the restart."""
    prompt = words(tiny_reference, LONG_PROMPT_TOKENS, seed=2)
    async with tiny_up.client(max_retries=100) as client, asyncio.timeout(HANG_SECONDS):
        work = complete(client, tiny_up.name, prompt, max_tokens=10, ignore_eos=True)
        task = asyncio.create_task(work)
        await until(tiny_up.in_prefill, "a room in prefill")
        pid = tiny_up.pid_of("prefill")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        answer = await task
    tiny_reference.assert_greedy(prompt, answer.text, answer.completion_tokens, 10, ignore_eos=True)


async def test_decode_killed_in_mid_stream(cluster: Cluster, tiny_reference: Reference) -> None:
    prompts = [words(tiny_reference, 20 + 9 * n, seed=n) for n in range(8)]
    recomputed = cluster.metric("pdrt_recomputed_prompt_tokens_total", role="gateway")
    async with Streams(cluster, LASTING_TOKENS) as streams:
        await streams.begin(prompts)
        cluster.processes["decode-0"].kill()
    streams.assert_unharmed(tiny_reference)
    assert cluster.metric("pdrt_recomputed_prompt_tokens_total", role="gateway") > recomputed


async def test_gateway_killed_in_mid_stream(cluster: Cluster, tiny_reference: Reference) -> None:
    prompts = [words(tiny_reference, 20, seed=n) for n in range(4)]
    cancelled = cluster.metric("pdrt_requests_total", role="decode", outcome="cancelled")
    async with cluster.client() as client, asyncio.timeout(HANG_SECONDS):
        begun = [asyncio.Event() for _ in prompts]
        tasks = [
            asyncio.create_task(stream_without_end(client, cluster.name, prompt, event))
            for prompt, event in zip(prompts, begun, strict=True)
        ]
        for event in begun:
            await event.wait()
        cluster.processes["gateway"].kill()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, Exception), result
    cluster.start("gateway")
    await until(cluster.is_complete, "the workers to come back")
    await asyncio.to_thread(cluster.wait_whole)
    now = cluster.metric("pdrt_requests_total", role="decode", outcome="cancelled")
    assert now == cancelled + len(prompts)
    await assert_serves(cluster, tiny_reference)


async def test_prefill_stopped_and_woken(cluster: Cluster, tiny_reference: Reference) -> None:
    """What it had goes elsewhere; woken up, it is paired again and serves."""
    stopped = cluster.processes["prefill-0"]
    endpoint = cluster.worker("prefill-0")["endpoint"]
    prompts = [words(tiny_reference, 30 + n, seed=n) for n in range(8)]
    stopped.send(signal.SIGSTOP)
    try:
        async with cluster.client() as client, asyncio.timeout(HANG_SECONDS):
            answers = await asyncio.gather(
                *(
                    complete(client, cluster.name, prompt, max_tokens=10, ignore_eos=True)
                    for prompt in prompts
                )
            )
            await until(
                lambda: all(endpoint not in w["paired"] for w in cluster.workers("decode")),
                "the stopped worker to be lost",
            )
    finally:
        stopped.send(signal.SIGCONT)
    for prompt, answer in zip(prompts, answers, strict=True):
        tiny_reference.assert_greedy(prompt, answer.text, 10, 10, ignore_eos=True)
    await until(cluster.is_complete, "the woken worker to be paired")
    assert stopped.is_running
    await assert_serves(cluster, tiny_reference)


async def test_decode_stopped_in_mid_stream_and_woken(
    cluster: Cluster, tiny_reference: Reference
) -> None:
    """Its streams go on elsewhere; what it still says of them when it wakes up changes nothing."""
    stopped = cluster.processes["decode-1"]
    prompts = [words(tiny_reference, 20 + n, seed=n) for n in range(6)]
    async with Streams(cluster, LASTING_TOKENS) as streams:
        await streams.begin(prompts)
        stopped.send(signal.SIGSTOP)
        try:
            await until(lambda: len(cluster.workers("decode")) == 1, "the stopped one to be lost")
        finally:
            stopped.send(signal.SIGCONT)
    streams.assert_unharmed(tiny_reference)
    await until(cluster.is_complete, "the woken worker to be back")
    assert stopped.is_running
    await assert_serves(cluster, tiny_reference)


async def test_gateway_stopped_and_woken(cluster: Cluster, tiny_reference: Reference) -> None:
    """Its workers take it for lost and cancel; it was itself asleep, and accuses nobody."""
    gateway = cluster.processes["gateway"]
    workers = [cluster.processes[name] for name in ("decode-0", "decode-1")]
    loss = f"gateway lost gateway=127.0.0.1:{cluster.worker_port}"
    before = [worker.text().count(loss) for worker in workers]
    async with Streams(cluster, LASTING_TOKENS) as streams:
        await streams.begin([words(tiny_reference, 20 + n, seed=n) for n in range(2)])
        gateway.send(signal.SIGSTOP)
        try:
            for worker, losses in zip(workers, before, strict=True):
                await asyncio.to_thread(worker.wait_for, loss, losses + 1)
        finally:
            gateway.send(signal.SIGCONT)
    streams.assert_unharmed(tiny_reference)
    await until(cluster.is_complete, "the workers to be back")
    await assert_serves(cluster, tiny_reference)


def incarnations(deployment: Deployment) -> dict[str, str]:
    """By role, where there is one of each; two of a role are named by neither."""
    status = deployment.status()
    if status is None:
        return {}
    workers = [worker for worker in status["workers"] if worker["state"] != "lost"]
    roles = [worker["role"] for worker in workers]
    found = {w["role"]: w["worker"] for w in workers if roles.count(w["role"]) == 1}
    return {"gateway": status["gateway"]["incarnation"], **found}


@pytest.mark.parametrize("role", ("prefill", "decode", "gateway"))
async def test_each_role_killed_under_up(
    tiny_up: Deployment, tiny_reference: Reference, role: str
) -> None:
    before = tiny_up.pid_of(role)
    assert before is not None
    others = {other: tiny_up.pid_of(other) for other in {"prefill", "decode", "gateway"} - {role}}
    known = incarnations(tiny_up)
    os.kill(before, signal.SIGKILL)
    await until(lambda: tiny_up.pid_of(role) not in (None, before), f"another {role}")

    def is_renewed() -> bool:
        """The killed one's successor, and the others as they were, make a pair."""
        now = incarnations(tiny_up)
        changed = {name for name in known if now.get(name) != known[name]}
        return changed == {role} and tiny_up.is_ready() and not tiny_up.troubles()

    await until(is_renewed, "whole and ready again")
    await assert_serves(tiny_up, tiny_reference)
    assert {other: tiny_up.pid_of(other) for other in others} == others


async def test_up_killed_and_up_interrupted(
    tmp_path: Path, tiny_model: Path, tiny_reference: Reference
) -> None:
    """Nothing is left by SIGKILL; nor by Ctrl-C, which lets streams end first."""
    with Deployment(tmp_path, str(tiny_model)) as deployment:
        up = deployment.up(*TINY_FLAGS)
        await until(deployment.is_ready, "ready")
        async with deployment.client() as client, asyncio.timeout(HANG_SECONDS):
            begun = asyncio.Event()
            stream = stream_without_end(client, deployment.name, [5, 6], begun)
            task = asyncio.create_task(stream)
            await begun.wait()
            up.send(signal.SIGKILL)
            assert await asyncio.to_thread(up.wait) == -signal.SIGKILL
            (result,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(result, Exception)
        await asyncio.to_thread(deployment.assert_nothing_left)

        up = deployment.up(*TINY_FLAGS)
        await until(deployment.is_ready, "ready")
        deployment.assert_holds_nothing_named()
        async with Streams(deployment) as streams:
            await streams.begin([words(tiny_reference, 20, seed=n) for n in range(4)])
            up.send(signal.SIGINT)
        assert await asyncio.to_thread(up.wait) == 0
        await asyncio.to_thread(deployment.assert_nothing_left)
        streams.assert_unharmed(tiny_reference)


@pytest.mark.slow
async def test_a_prefill_worker_that_stays_stopped_is_killed(
    tmp_path: Path, tiny_model: Path, tiny_reference: Reference
) -> None:
    """Mapped memory cannot be taken back from a living process: the fence ends it."""
    with Deployment(tmp_path, str(tiny_model)) as deployment:
        deployment.gateway()
        deployment.decode("decode-0", *TINY_FLAGS, "--kill-lost-after-seconds", "2")
        prefill = deployment.prefill("prefill-0", *TINY_FLAGS)
        await until(deployment.is_complete, "paired")
        async with deployment.client() as client, asyncio.timeout(HANG_SECONDS):
            prefill.send(signal.SIGSTOP)
            work = complete(client, deployment.name, [5] * 40, max_tokens=10, ignore_eos=True)
            task = asyncio.create_task(work)
            assert await asyncio.to_thread(prefill.wait) == -9
            await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not deployment.troubles(), "whole")
        assert deployment.metric("pdrt_fences_total", role="decode") == 1
        deployment.prefill("prefill-0", *TINY_FLAGS)
        await until(deployment.is_complete, "paired again")
        await assert_serves(deployment, tiny_reference)
