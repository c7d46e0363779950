"""One fault after another while clients come and go: every answer is right, and once all is
healed both pools are whole."""

from __future__ import annotations

import asyncio
import random
import signal

import pytest

from tests.e2e.clients import Answer, complete, disconnect
from tests.e2e.conftest import Cluster
from tests.e2e.deployment import until
from tests.e2e.reference import Reference, words
from tests.e2e.streams import assert_serves

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FAULTS = 16
OUTPUT_TOKENS = 100
WORKERS = ("decode-0", "decode-1", "prefill-0", "prefill-1")


async def harm(cluster: Cluster, dice: random.Random) -> str:
    """One worker at a time, so that there is always a pair left; returns once it is healed."""
    name = dice.choice(WORKERS)
    process = cluster.processes[name]
    kind = dice.choice(("kill", "leave", "pause", "stop"))
    match kind:
        case "kill":
            process.kill()
        case "leave":
            process.send(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait) == 0
        case "pause":
            process.send(signal.SIGSTOP)
            await asyncio.sleep(dice.random())
            process.send(signal.SIGCONT)
        case "stop":
            incarnation = process.incarnation
            process.send(signal.SIGSTOP)
            await until(
                lambda: incarnation not in [w["worker"] for w in cluster.workers()],
                "the stopped worker to be lost",
            )
            process.send(signal.SIGCONT)
    if not process.is_running:
        cluster.start(name)
    await until(cluster.is_complete, f"all to be paired after {kind} of {name}")
    return f"{kind} {name}"


@pytest.mark.parametrize("seed", (1, 2))
async def test_faults_under_load(cluster: Cluster, tiny_reference: Reference, seed: int) -> None:
    dice = random.Random(seed)
    prompts = [words(tiny_reference, length, seed=length) for length in (1, 16, 33, 200, 900)]
    answers: list[tuple[list[int], Answer]] = []
    done: list[str] = []
    ended = asyncio.Event()

    async with cluster.client() as client, asyncio.TaskGroup() as group:

        async def ask(own: random.Random) -> None:
            while not ended.is_set():
                prompt = own.choice(prompts)
                stream = own.random() < 0.7
                answer = await complete(
                    client,
                    cluster.name,
                    prompt,
                    stream=stream,
                    max_tokens=OUTPUT_TOKENS,
                    ignore_eos=True,
                )
                answers.append((prompt, answer))

        async def go_away(own: random.Random) -> None:
            while not ended.is_set():
                await disconnect(client, cluster.name, own.choice(prompts), own, OUTPUT_TOKENS)

        for _ in range(5):
            group.create_task(ask(random.Random(dice.random())))
        for _ in range(2):
            group.create_task(go_away(random.Random(dice.random())))
        try:
            for _ in range(FAULTS):
                done.append(await harm(cluster, dice))
        finally:
            ended.set()
    assert len(answers) > FAULTS, done
    for prompt, answer in answers:
        assert answer.completion_tokens == OUTPUT_TOKENS, done
        tiny_reference.assert_greedy(
            prompt, answer.text, OUTPUT_TOKENS, OUTPUT_TOKENS, ignore_eos=True
        )
    await until(lambda: not cluster.troubles(), "whole")
    await assert_serves(cluster, tiny_reference)
