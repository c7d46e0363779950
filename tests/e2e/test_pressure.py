"""Pools and queues that are too small for what is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.clients import complete
from tests.e2e.deployment import HANG_SECONDS, Deployment, until
from tests.e2e.reference import Reference, words
from tests.e2e.streams import Streams, assert_serves

pytestmark = pytest.mark.e2e

PAGES = 40
PAGE_BYTES = 16 * 6 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, head_dim, float32
QUEUE_MAX = 4
PREEMPTED = ("pdrt_preemptions_total", "pdrt_recomputed_prompt_tokens_total")
"""What counts sequences that give their pages up."""


@pytest.fixture(scope="module")
def _small(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("small"), str(tiny_model)) as deployment:
        deployment.up(
            *("--dtype", "float32", "--kv-cache-memory-bytes", str(PAGES * PAGE_BYTES)),
            *("--max-model-len", "600", "--queue-max", str(QUEUE_MAX)),
            *("--max-num-seqs", "8", "--max-num-batched-tokens", "32"),
        )
        deployment.wait_ready()
        yield deployment


@pytest.fixture
def small(_small: Deployment) -> Iterator[Deployment]:
    """40 pages of 16 tokens on either side; whole after every test."""
    assert all(worker["load"]["pages_total"] == PAGES for worker in _small.workers())
    yield _small
    _small.wait_whole()


async def test_preempted_sequences_lose_nothing(
    small: Deployment, tiny_reference: Reference
) -> None:
    """Six answers of 15 pages each, of 40."""
    before = {name: small.metric(name, role="decode") for name in PREEMPTED}
    prompts = [words(tiny_reference, 40, seed=n) for n in range(6)]
    async with small.client(max_retries=20) as client, asyncio.timeout(HANG_SECONDS):
        answers = await asyncio.gather(
            *(
                complete(client, small.name, prompt, max_tokens=200, ignore_eos=True)
                for prompt in prompts
            )
        )
    for name, count in before.items():
        assert small.metric(name, role="decode") > count, name
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.completion_tokens == 200
        tiny_reference.assert_greedy(prompt, answer.text, 200, 200, ignore_eos=True)


async def test_full_pools_queue_and_then_refuse(
    small: Deployment, tiny_reference: Reference
) -> None:
    """Those that fit run, `queue_max` wait, others get 429 and Retry-After; waiting ends well."""
    prompts = [words(tiny_reference, 480, seed=n) for n in range(12)]
    async with Streams(small, tokens=100) as streams, small.client() as client:
        # It is admitted before the others come; all together might find the queue full of it.
        await streams.begin(prompts[:1])
        results = await asyncio.gather(
            *(
                complete(client, small.name, prompt, max_tokens=100, ignore_eos=True)
                for prompt in prompts[1:]
            ),
            return_exceptions=True,
        )
    streams.assert_unharmed(tiny_reference)
    refused = [result for result in results if isinstance(result, openai.RateLimitError)]
    served = [result for result in results if not isinstance(result, BaseException)]
    assert refused and len(refused) + len(served) == len(results), results
    assert len(served) >= QUEUE_MAX
    assert all(int(error.response.headers["retry-after"]) >= 1 for error in refused)
    for prompt, result in zip(prompts[1:], results, strict=True):
        if not isinstance(result, BaseException):
            tiny_reference.assert_greedy(prompt, result.text, 100, 100, ignore_eos=True)


async def test_a_prompt_beyond_the_context(small: Deployment, tiny_reference: Reference) -> None:
    async with small.client() as client:
        for prompt in ([5] * 600, [5] * 601, "word " * 5000):
            with pytest.raises(openai.BadRequestError) as caught:
                await complete(client, small.name, prompt, max_tokens=1)
            assert caught.value.code == "context_length_exceeded"
            assert "600" in caught.value.message
        with pytest.raises(openai.BadRequestError) as caught:
            await complete(client, small.name, [5] * 300, max_tokens=301)
        assert "600" in caught.value.message
    await assert_serves(small, tiny_reference)


async def test_waiting_clients_may_leave(small: Deployment, tiny_reference: Reference) -> None:
    async with small.client() as client, asyncio.timeout(HANG_SECONDS):
        tasks = []
        for n in range(4):
            prompt = words(tiny_reference, 400, seed=n)
            work = complete(client, small.name, prompt, max_tokens=190, ignore_eos=True)
            tasks.append(asyncio.create_task(work))
        await until(lambda: small.metric("pdrt_queue", role="decode"), "a queue")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: not small.troubles(), "whole")
    await assert_serves(small, tiny_reference)
