"""Every worker is asked to leave and started anew, one after another, while clients go on."""

from __future__ import annotations

import asyncio
import itertools
import signal
from pathlib import Path

import openai
import pytest

from tests.e2e.clients import Answer, complete
from tests.e2e.conftest import TINY_FLAGS, Cluster
from tests.e2e.deployment import HANG_SECONDS, Deployment, until
from tests.e2e.reference import Reference, words
from tests.e2e.streams import LASTING_TOKENS, Streams, assert_serves

pytestmark = pytest.mark.e2e

CLIENTS = 4
WORKERS = ("decode-0", "prefill-0", "decode-1", "prefill-1")


class Load:
    """Clients that ask one greedy request after another until they are told to stop."""

    def __init__(self, deployment: Deployment, reference: Reference) -> None:
        self._deployment = deployment
        self._reference = reference
        self._is_over = False
        self.answers: list[tuple[list[int], int, Answer]] = []
        """Prompt, tokens asked for, and what came."""

    def stop(self) -> None:
        """Each client ends the request it is at."""
        self._is_over = True

    async def run(self) -> None:
        """An error of any client ends this with it: no 5xx, no broken stream."""
        async with self._deployment.client() as client, asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._ask(client, number))

    async def _ask(self, client: openai.AsyncOpenAI, number: int) -> None:
        for turn in itertools.count():
            if self._is_over:
                return
            # Short and long, streamed and whole; beginnings that are shared, and that are not.
            prompt = words(self._reference, 20 + 70 * (turn % 4), seed=number * (turn % 2))
            tokens = (5, 40, 90)[(turn + number) % 3]
            answer = await complete(
                client,
                self._deployment.name,
                prompt,
                stream=turn % 2 == 0,
                max_tokens=tokens,
                ignore_eos=True,
            )
            self.answers.append((prompt, tokens, answer))

    async def more(self, clients: asyncio.Task[None]) -> None:
        """Until each has had a whole answer from now on, so that what was restarted just now has
        served."""
        wanted = len(self.answers) + 2 * CLIENTS
        await until(lambda: clients.done() or len(self.answers) >= wanted, "answers")

    def assert_unharmed(self) -> None:
        """Whole and right, every one."""
        for prompt, tokens, answer in self.answers:
            assert (answer.completion_tokens, answer.finish_reason) == (tokens, "length")
            self._reference.assert_greedy(prompt, answer.text, tokens, tokens, ignore_eos=True)


async def test_a_rolling_restart_of_every_worker_loses_no_request(
    cluster: Cluster, tiny_reference: Reference
) -> None:
    load = Load(cluster, tiny_reference)
    before = {name: cluster.processes[name].incarnation for name in WORKERS}
    async with asyncio.timeout(3 * HANG_SECONDS), asyncio.TaskGroup() as group:
        clients = group.create_task(load.run())
        await load.more(clients)
        for name, is_asked_over_http in zip(WORKERS, (True, True, False, False), strict=True):
            process = cluster.processes[name]
            if is_asked_over_http:
                await asyncio.to_thread(cluster.drain, name)
            else:
                process.send(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait) == 0
            cluster.start(name)
            await until(lambda: clients.done() or cluster.is_complete(), "its successor")
            await load.more(clients)
        load.stop()
    load.assert_unharmed()
    assert all(cluster.processes[name].incarnation != before[name] for name in WORKERS)


async def test_streams_longer_than_the_time_to_finish_go_on_elsewhere(
    cluster: Cluster, tiny_reference: Reference
) -> None:
    """The worker leaves after its `--shutdown-timeout`; what it had moves, token for token."""
    cluster.decode("decode-1", *TINY_FLAGS, "--shutdown-timeout", "0.01")
    await until(cluster.is_complete, "the impatient one")
    recomputed = cluster.metric("pdrt_recomputed_prompt_tokens_total", role="gateway")
    async with Streams(cluster, LASTING_TOKENS) as streams:
        await streams.begin([words(tiny_reference, 40, seed=n) for n in range(6)])
        await asyncio.to_thread(cluster.drain, "decode-1")
        assert await asyncio.to_thread(cluster.processes["decode-1"].wait) == 0
    streams.assert_unharmed(tiny_reference)
    assert cluster.metric("pdrt_recomputed_prompt_tokens_total", role="gateway") > recomputed


async def test_the_only_decode_worker_finishes_what_it_has_and_up_starts_it_anew(
    tmp_path: Path, tiny_model: Path, tiny_reference: Reference
) -> None:
    with Deployment(tmp_path, str(tiny_model)) as deployment:
        deployment.up(*TINY_FLAGS)
        await until(deployment.is_ready, "ready")
        (worker,) = deployment.workers("decode")
        async with Streams(deployment) as streams:
            await streams.begin([words(tiny_reference, 40, seed=n) for n in range(3)])
            drain = deployment.run(
                "drain", "drain", worker["worker"][:8], "--url", deployment.url, "--replaced"
            )
        streams.assert_unharmed(tiny_reference)
        assert await asyncio.to_thread(drain.wait) == 0, drain.text()
        assert f"decode {worker['worker']} is gone" in drain.text()
        (successor,) = deployment.workers("decode")
        assert successor["worker"] != worker["worker"]
        left = "decode-0 left when asked; starting it anew"
        await asyncio.to_thread(deployment.processes["up"].wait_for, left)
        await assert_serves(deployment, tiny_reference)
        await asyncio.to_thread(deployment.wait_whole)
