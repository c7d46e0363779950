"""Disaggregated greedy output is what transformers generates in one piece, token for token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.clients import chat, complete, disconnect
from tests.e2e.conftest import REAL_FLAGS
from tests.e2e.deployment import HANG_SECONDS, Deployment
from tests.e2e.reference import Reference

pytestmark = pytest.mark.e2e

TEXT = (
    "The history of computing began long before anybody built an electronic machine. People "
    "counted with pebbles, knotted strings and beads on wires; merchants kept ledgers, and "
    "astronomers filled whole rooms with tables of numbers that had been worked out by hand. "
) * 8
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 300)
"""Around the ends of pages, of 16 tokens; 300 takes many pages and chunks."""
CHATS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Because air scatters blue light most."},
        {"role": "user", "content": "And why is it red in the evening?"},
    ],
    [{"role": "user", "content": "Schreibe ein kurzes Gedicht über Käse 🧀 und Mäuse 🐭."}],
)


def prompt_of(reference: Reference, length: int) -> list[int]:
    return reference.encode(TEXT)[:length]


@pytest.mark.parametrize("length", LENGTHS)
async def test_a_plain_prompt_of_any_length(
    real: Deployment, real_reference: Reference, length: int
) -> None:
    prompt = prompt_of(real_reference, length)
    async with real.client() as client:
        answer = await complete(client, real.name, prompt, max_tokens=6, ignore_eos=True)
    assert (answer.prompt_tokens, answer.completion_tokens) == (length, 6)
    real_reference.assert_greedy(prompt, answer.text, 6, 6, ignore_eos=True)


@pytest.mark.parametrize("messages", CHATS, ids=("one turn", "several turns", "beyond ASCII"))
@pytest.mark.parametrize("stream", (False, True), ids=("whole", "streamed"))
async def test_a_chat(
    real: Deployment, real_reference: Reference, messages: list[dict[str, str]], stream: bool
) -> None:
    async with real.client() as client:
        answer = await chat(client, real.name, messages, stream=stream, max_tokens=20)
    prompt = real_reference.chat(messages)
    assert answer.prompt_tokens == len(prompt)
    assert answer.finish_reason == ("length" if answer.completion_tokens == 20 else "stop")
    real_reference.assert_greedy(prompt, answer.text, answer.completion_tokens, 20)


async def test_an_answer_that_ends_by_itself(real: Deployment, real_reference: Reference) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? One word."}]
    async with real.client() as client:
        answer = await chat(client, real.name, messages, stream=True, max_tokens=200)
    assert answer.finish_reason == "stop"
    prompt = real_reference.chat(messages)
    real_reference.assert_greedy(prompt, answer.text, answer.completion_tokens, 200)


async def compare_many(
    deployment: Deployment, reference: Reference, count: int, aborting: int, seed: int
) -> None:
    """`count` answers at once, each compared, while `aborting` other clients go away at random."""
    dice = random.Random(seed)
    prompts = [prompt_of(reference, dice.randrange(1, 60)) for _ in range(count)]
    ended = asyncio.Event()

    async with deployment.client() as client:

        async def go_away(own: random.Random) -> None:
            while not ended.is_set():
                prompt = prompt_of(reference, own.randrange(1, 60))
                await disconnect(client, deployment.name, prompt, own, 20)

        async with asyncio.timeout(HANG_SECONDS), asyncio.TaskGroup() as group:
            for _ in range(aborting):
                group.create_task(go_away(random.Random(dice.random())))
            try:
                answers = await asyncio.gather(
                    *(
                        complete(
                            client,
                            deployment.name,
                            prompt,
                            stream=index % 2 == 0,
                            max_tokens=8,
                            ignore_eos=True,
                        )
                        for index, prompt in enumerate(prompts)
                    )
                )
            finally:
                ended.set()
    for prompt, answer in zip(prompts, answers, strict=True):
        reference.assert_greedy(prompt, answer.text, answer.completion_tokens, 8, ignore_eos=True)


async def test_sixteen_at_once(real: Deployment, real_reference: Reference) -> None:
    await compare_many(real, real_reference, count=16, aborting=0, seed=1)


async def test_while_others_abort(real: Deployment, real_reference: Reference) -> None:
    await compare_many(real, real_reference, count=8, aborting=6, seed=2)


@pytest.fixture(scope="module")
def default_chunks(
    tmp_path_factory: pytest.TempPathFactory, real_model: Path
) -> Iterator[Deployment]:
    """The real model where a prompt is one chunk."""
    with Deployment(tmp_path_factory.mktemp("default"), str(real_model)) as deployment:
        deployment.up(*REAL_FLAGS[:6])
        deployment.wait_ready()
        yield deployment
        deployment.wait_whole()


@pytest.mark.slow
async def test_plain_prompts_in_one_chunk(
    default_chunks: Deployment, real_reference: Reference
) -> None:
    async with default_chunks.client() as client:
        for length in (*LENGTHS, 511, 512, 513):
            prompt = prompt_of(real_reference, length)
            answer = await complete(client, default_chunks.name, prompt, max_tokens=100)
            real_reference.assert_greedy(prompt, answer.text, answer.completion_tokens, 100)


@pytest.mark.slow
async def test_many_at_once_in_one_chunk(
    default_chunks: Deployment, real_reference: Reference
) -> None:
    await compare_many(default_chunks, real_reference, count=48, aborting=8, seed=3)
