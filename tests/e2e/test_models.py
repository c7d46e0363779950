"""`pdrt up` with models of other kinds than the default one: what is answered is what transformers
generates from the same directory."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from tests.e2e.clients import complete
from tests.e2e.conftest import TINY_FLAGS
from tests.e2e.deployment import HANG_SECONDS, Deployment, until
from tests.e2e.reference import Reference, words
from tests.model.tiny import ALTERNATING, WINDOW, write_model

pytestmark = pytest.mark.e2e

TOKENS = 12
LENGTHS = (5, 40, 90)
"""Shorter than the window, and several chunks beyond it."""


async def assert_answers(deployment: Deployment, reference: Reference) -> None:
    prompts = [words(reference, length, length) for length in LENGTHS]
    async with deployment.client() as client, asyncio.timeout(HANG_SECONDS):
        answers = await asyncio.gather(
            *(
                complete(client, deployment.name, prompt, max_tokens=TOKENS, ignore_eos=True)
                for prompt in prompts
            )
        )
    for prompt, answer in zip(prompts, answers, strict=True):
        reference.assert_greedy(prompt, answer.text, TOKENS, TOKENS, ignore_eos=True)
    await asyncio.to_thread(deployment.wait_whole)


async def test_windows_by_layer_in_bfloat16_shards(tmp_path: Path) -> None:
    model = tmp_path / "gemma"
    windows = {"sliding_window": WINDOW, "layer_types": ALTERNATING, "initializer_range": 0.12}
    write_model(model, "Gemma3TextConfig", windows, dtype=torch.bfloat16, max_shard_size="100KB")
    assert len(list(model.glob("*.safetensors"))) > 1
    with Deployment(tmp_path / "up", str(model)) as deployment:
        deployment.up(*TINY_FLAGS)
        await until(deployment.is_ready, "ready")
        await assert_answers(deployment, Reference(model))


async def test_dummy_weights_of_a_configuration(tmp_path: Path) -> None:
    """No weights anywhere: both workers draw the same ones, and the gateway does without."""
    whole, bare = tmp_path / "whole", tmp_path / "bare"
    write_model(whole, "Qwen3Config", {"initializer_range": 0.12})
    shutil.copytree(whole, bare)
    (bare / "model.safetensors").unlink()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(bare))
    drawn.save_pretrained(whole)
    with Deployment(tmp_path / "up", str(bare)) as deployment:
        deployment.up(*TINY_FLAGS, "--load-format", "dummy")
        await until(deployment.is_ready, "ready")
        await assert_answers(deployment, Reference(whole))


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="needs bitsandbytes")
async def test_quantized_workers_pair_with_each_other_only(tmp_path: Path) -> None:
    model, quantized = tmp_path / "plain", tmp_path / "quantized"
    write_model(model, "LlamaConfig", {"initializer_range": 0.12})
    shutil.copytree(model, quantized)
    kind = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float32"
    )
    AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, quantization_config=kind
    ).save_pretrained(quantized)
    with Deployment(tmp_path / "up", str(model)) as deployment:
        deployment.gateway()
        deployment.prefill("prefill-0", *TINY_FLAGS)
        deployment.decode("decode-0", *TINY_FLAGS, "--quantization", "nf4")
        complaint = await until(
            lambda: next((r for r in deployment.reasons() or [] if "+nf4" in r), None),
            "the difference to be told",
        )
        assert "digest" in complaint
        deployment.prefill("prefill-1", *TINY_FLAGS, "--quantization", "nf4")
        await until(deployment.is_ready, "ready")
        await assert_answers(deployment, Reference(quantized))
