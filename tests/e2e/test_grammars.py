"""Answers that have to follow a schema do, also when they move to another worker or are preempted;
tools can be forced."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.conftest import TINY_FLAGS, Cluster
from tests.e2e.deployment import HANG_SECONDS, Deployment
from tests.model.templates import TEMPLATES
from tests.model.tiny import make_tiny_model, make_tokenizer

pytest.importorskip("xgrammar")
jsonschema = pytest.importorskip("jsonschema")
pytestmark = pytest.mark.e2e

PAGES = 64
"""What one sequence may need."""
PAGE_BYTES = 16 * 3 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, head_dim, float32
CITIES = ["Paris", "Rome", "Oslo"]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}, "days": {"type": "boolean"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "What is the weather like?"}]


def journeys(length: int) -> dict[str, Any]:
    """A schema whose values have some thirty tokens per item: a random model ends them only because
    it has to."""
    items = {"type": "array", "items": WEATHER, "minItems": length, "maxItems": length}
    return {
        "type": "object",
        "properties": {"journey": items},
        "required": ["journey"],
        "additionalProperties": False,
    }


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "journey", "schema": schema}}


def assert_follows(text: str, schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


async def stream(
    client: openai.AsyncOpenAI, model: str, schema: dict[str, Any], seed: int, begun: asyncio.Event
) -> str:
    """A chat's answer; `begun` is set in the middle of it."""
    create: Any = client.chat.completions.create
    events = await create(
        **{"model": model, "messages": MESSAGES, "seed": seed, "temperature": 1, "stream": True},
        response_format=response_format(schema),
    )
    pieces: list[str] = []
    finish_reason = None
    async for event in events:
        (choice,) = event.choices
        pieces.append(choice.delta.content or "")
        finish_reason = choice.finish_reason or finish_reason
        if len(pieces) > 10:
            begun.set()
    assert finish_reason == "stop"
    return "".join(pieces)


@pytest.mark.slow  # it imports xgrammar into four workers
async def test_a_schema_is_followed_when_decode_is_killed_in_mid_stream(cluster: Cluster) -> None:
    """What was drawn before on one worker and what is drawn after on another are one answer: the
    same as without the fault."""
    schema = journeys(8)
    recomputed = cluster.metric("pdrt_recomputed_prompt_tokens_total", role="gateway")
    async with cluster.client() as client, asyncio.timeout(HANG_SECONDS):
        events = [asyncio.Event() for _ in range(4)]
        tasks = [
            asyncio.create_task(stream(client, cluster.name, schema, seed, event))
            for seed, event in enumerate(events)
        ]
        for event in events:
            await event.wait()
        cluster.processes["decode-0"].kill()
        texts = await asyncio.gather(*tasks)
        again = await stream(client, cluster.name, schema, 0, asyncio.Event())
    for text in texts:
        assert_follows(text, schema)
    assert texts[0] == again
    assert cluster.metric("pdrt_recomputed_prompt_tokens_total", role="gateway") > recomputed


@pytest.fixture(scope="module")
def _tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("tools")
    model = make_tiny_model(folder / "tiny", max_position_embeddings=1024)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATES["hermes"]
    tokenizer.save_pretrained(model)
    with Deployment(folder / "up", str(model)) as deployment:
        flags = ("--kv-cache-memory-bytes", str(PAGES * PAGE_BYTES))
        deployment.up(*TINY_FLAGS, *flags, "--enable-prefix-caching", "false")
        deployment.wait_ready()
        yield deployment


@pytest.fixture
def tools(_tools: Deployment) -> Iterator[Deployment]:
    """A model whose chat template has tools, in a small pool without a prefix cache. Whole after
    every test."""
    yield _tools
    _tools.wait_whole()


@pytest.mark.parametrize("choice", ("named", "required"))
async def test_a_forced_call(tools: Deployment, choice: str) -> None:
    """Its arguments follow the schema of the tool, whole and streamed."""
    parameters = {"weather": WEATHER, "travel": journeys(1)}
    asked: dict[str, Any] = {
        "model": tools.name,
        "messages": MESSAGES,
        "tools": [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name, schema in parameters.items()
        ],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    if choice == "required":
        asked["tool_choice"] = "required"
    async with tools.client() as client, asyncio.timeout(HANG_SECONDS):
        create: Any = client.chat.completions.create
        whole = await create(**asked)
        names, arguments, reasons = [], "", []
        async for event in await create(**asked, stream=True):
            (chunk,) = event.choices
            reasons.append(chunk.finish_reason)
            for delta in chunk.delta.tool_calls or ():
                names += [delta.function.name] if delta.function.name else []
                arguments += delta.function.arguments or ""
    (call,) = whole.choices[0].message.tool_calls
    assert whole.choices[0].finish_reason == reasons[-1] == "tool_calls"
    assert names == [call.function.name] and arguments == call.function.arguments
    assert choice == "required" or names == ["weather"]
    assert_follows(arguments, parameters[call.function.name])


async def test_nothing_is_cached_without_a_cache(tools: Deployment) -> None:
    async with tools.client() as client:
        for _ in range(2):
            create: Any = client.chat.completions.create
            answer = await create(model=tools.name, messages=MESSAGES * 9, max_tokens=2)
            assert answer.usage.prompt_tokens > 64
            assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_schema_is_followed_by_preempted_sequences(tools: Deployment) -> None:
    """Ten answers of some twenty pages each, of 64."""
    schema = journeys(10)
    before = tools.metric("pdrt_preemptions_total")
    async with tools.client(max_retries=20) as client, asyncio.timeout(HANG_SECONDS):
        texts = await asyncio.gather(
            *(stream(client, tools.name, schema, seed, asyncio.Event()) for seed in range(10))
        )
    for text in texts:
        assert_follows(text, schema)
    assert len(set(texts)) > 1
    assert tools.metric("pdrt_preemptions_total") > before
