"""A prompt that decode computes itself gives what a hand-over gives: over a real model, float32."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdrt.config import DeviceConfig, ModelConfig, SchedulerConfig
from pdrt.model.executor import Executor
from pdrt.sampling import Sampling
from tests.decode.deployment import Deployment, GatewayPeer, Stream
from tests.model.tiny import make_tiny_model

OUTPUT = 24
CLOSE = 1e-4
SCHEDULER = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=24, local_prefill_tokens=7)
"""Chunks end within pages."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "top_p": 0.95, "seed": 7},
    "penalties": {
        **{"temperature": 0.8, "seed": 8, "presence_penalty": 0.7},
        **{"frequency_penalty": 0.4, "repetition_penalty": 1.3},
    },
    "scored": {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")
    return directory


def load(model: Path) -> Any:
    config = ModelConfig(model=str(model), dtype="float32", kv_cache_memory_bytes=8 * 2**20)
    return Executor.load(config, DeviceConfig(device="cpu", threads=1), lambda text: None)


class Two:
    """Deployments of one model: by hand-over, and without a prefill worker."""

    def __init__(self, model: Path) -> None:
        self.handing_over, self.alone = Deployment(GatewayPeer()), Deployment(GatewayPeer())
        self.handing_over.add_prefill(load(model), self.handing_over.config(scheduler=SCHEDULER))
        for deployment in (self.handing_over, self.alone):
            deployment.add_decode(load(model), deployment.config(scheduler=SCHEDULER))

    async def ask(
        self, deployment: Deployment, prompt: list[int], earlier: list[int], **sampling: Any
    ) -> Stream:
        (decode,) = deployment.decodes
        wanted = Sampling(max_tokens=OUTPUT, ignore_eos=True, **sampling)
        stream = deployment.gateway.submit(decode.incarnation, prompt, wanted, earlier=earlier)
        await stream.end()
        return stream

    async def compare(self, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
        """Both ways, and continued here from the middle of what the other way said; the output."""
        wanted = await self.ask(self.handing_over, prompt, [], **sampling)
        found = await self.ask(self.alone, prompt, [], **sampling)
        assert found.tokens == wanted.tokens
        assert len(found.tokens) == OUTPUT
        half = len(wanted.tokens) // 2
        rest = await self.ask(self.alone, prompt, wanted.tokens[:half], **sampling)
        assert rest.tokens == wanted.tokens[half:]
        assert_scored_alike(found, wanted)
        return found.tokens


def assert_scored_alike(found: Stream, wanted: Stream) -> None:
    assert (found.scores is None) == (wanted.scores is None)
    pairs = list(zip(found.logprobs, wanted.logprobs, strict=True))
    if found.scores is not None and wanted.scores is not None:
        pairs += zip(found.scores.logprobs, wanted.scores.logprobs, strict=True)
    for one, other in pairs:
        assert one.logprob == pytest.approx(other.logprob, abs=CLOSE)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.fixture
async def two(model: Path) -> AsyncIterator[Two]:
    made = Two(model)
    for deployment in (made.handing_over, made.alone):
        await deployment.paired()
    yield made
    (decode,) = made.handing_over.decodes
    assert decode.metrics.totals()["local_prefill_tokens"] == 0
    for deployment in (made.handing_over, made.alone):
        await deployment.quiet()
        await deployment.close()


def prompts(vocabulary: int) -> list[list[int]]:
    """Of lengths on and beside the edges of pages and chunks."""
    draw = random.Random(5)
    return [[draw.randrange(3, vocabulary) for _ in range(n)] for n in (1, 16, 17, 61)]


async def test_the_same_either_way(two: Two, model: Path) -> None:
    vocabulary = two.alone.decodes[0].executor.identity.vocab_size
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for prompt in prompts(vocabulary):
        outputs = {kind: await two.compare(prompt, asked) for kind, asked in KINDS.items()}
        assert outputs["scored"] == outputs["greedy"]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + outputs["greedy"]])).logits[0]
        best = logits[len(prompt) - 1 : -1].max(dim=-1).values
        chosen = logits[len(prompt) - 1 : -1].gather(1, torch.tensor([outputs["greedy"]]).T)[:, 0]
        assert torch.allclose(best, chosen, atol=CLOSE), "not what the model in one piece says"
