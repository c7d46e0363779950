"""Clients that go away leave both pools whole, and the next answer right."""

from __future__ import annotations

import pytest

from tests.e2e.clients import complete, disconnect_many
from tests.e2e.deployment import Deployment
from tests.e2e.reference import Reference, words

pytestmark = pytest.mark.e2e


async def test_two_hundred_disconnects(tiny_up: Deployment, tiny_reference: Reference) -> None:
    deployment = tiny_up
    prompts = [words(tiny_reference, length) for length in (1, 16, 40, 300, 900)]
    before, fences = client_gone(deployment), deployment.metric("pdrt_fences_total")
    kinds = await disconnect_many(deployment, prompts, 200, seed=12, max_tokens=100)
    assert kinds["early"] and kinds["mid-stream"], kinds
    deployment.wait_whole()
    async with deployment.client() as client:
        for prompt in prompts[:4]:
            answer = await complete(client, deployment.name, prompt, max_tokens=64, ignore_eos=True)
            tiny_reference.assert_greedy(prompt, answer.text, 64, 64, ignore_eos=True)
    deployment.wait_whole()
    gone = client_gone(deployment) - before
    # On a busy machine many give up before their request has been sent.
    assert gone >= kinds["mid-stream"] // 2 > 20, kinds
    assert deployment.metric("pdrt_fences_total") == fences


def client_gone(deployment: Deployment) -> float:
    return deployment.metric("pdrt_requests_total", role="gateway", outcome="client_gone")


@pytest.mark.slow
async def test_two_hundred_disconnects_from_the_real_model(
    real: Deployment, real_reference: Reference
) -> None:
    texts = ["Once upon a time", "The sea is " * 20, "Numbers: " + "1 2 3 4 " * 60]
    prompts = [real_reference.encode(text) for text in texts]
    await disconnect_many(real, prompts, 200, seed=13, max_tokens=40)
    real.wait_whole()
    async with real.client() as client:
        for prompt in prompts:
            answer = await complete(client, real.name, prompt, max_tokens=20, ignore_eos=True)
            real_reference.assert_greedy(prompt, answer.text, 20, 20, ignore_eos=True)
