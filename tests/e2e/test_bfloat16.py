"""In bfloat16 two correct programs round differently: compared by how often the reference, given
the same past, would have chosen another token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.e2e.clients import complete
from tests.e2e.conftest import REAL_FLAGS
from tests.e2e.deployment import HANG_SECONDS, Deployment, until
from tests.e2e.reference import Reference
from tests.e2e.test_greedy import TEXT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FLIPS_MAX = 0.05
"""Share of tokens. transformers itself, fed chunk by chunk, flips about 2 % against one forward."""


async def test_flip_rate(tmp_path: Path, real_model: Path) -> None:
    reference = Reference(real_model, torch.bfloat16)
    prompts = [reference.encode(TEXT)[start : start + 60] for start in range(0, 160, 20)]
    with Deployment(tmp_path, str(real_model)) as deployment:
        deployment.up(*REAL_FLAGS, "--dtype", "bfloat16")
        await until(deployment.is_ready, "ready")
        async with deployment.client() as client, asyncio.timeout(HANG_SECONDS):
            answers = await asyncio.gather(
                *(
                    complete(client, deployment.name, prompt, max_tokens=60, ignore_eos=True)
                    for prompt in prompts
                )
            )
        await asyncio.to_thread(deployment.wait_whole)
    flips = total = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        output = reference.encode(answer.text, add_special_tokens=False)
        flips += len(reference.flips(prompt, output))
        total += len(output)
    assert total > 300
    assert flips <= FLIPS_MAX * total, f"{flips} of {total} tokens"
