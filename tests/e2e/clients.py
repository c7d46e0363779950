"""What clients do, by the official `openai` package."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import openai

from tests.e2e.deployment import HANG_SECONDS, Deployment


class Answer(msgspec.Struct, frozen=True):
    """All that was received of one completion."""

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    pieces: int
    """Events with text in them; 1 when it was not streamed."""


def greedy(**settings: Any) -> dict[str, Any]:
    """Arguments of a greedy completion; what the package does not know goes into the body."""
    own = {"ignore_eos", "min_tokens", "top_k", "min_p", "stop_token_ids", "return_token_ids"}
    extra = {key: settings.pop(key) for key in own & settings.keys()}
    return {"temperature": 0, "extra_body": extra, **settings}


async def complete(
    client: openai.AsyncOpenAI,
    model: str,
    prompt: str | Sequence[int],
    stream: bool = False,
    **settings: Any,
) -> Answer:
    """POST /v1/completions."""
    asked: Any = prompt if isinstance(prompt, str) else list(prompt)
    create: Any = client.completions.create
    if stream:
        events = await create(
            model=model,
            prompt=asked,
            stream=True,
            stream_options={"include_usage": True},
            **greedy(**settings),
        )
        return await read(events, lambda choice: choice.text)
    answer = await create(model=model, prompt=asked, **greedy(**settings))
    choice = answer.choices[0]
    return _whole(choice.text, choice.finish_reason, answer.usage)


async def chat(
    client: openai.AsyncOpenAI,
    model: str,
    messages: list[dict[str, str]],
    stream: bool = False,
    **settings: Any,
) -> Answer:
    """POST /v1/chat/completions."""
    create: Any = client.chat.completions.create
    if stream:
        events = await create(
            model=model,
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
            **greedy(**settings),
        )
        return await read(events, lambda choice: choice.delta.content or "")
    answer = await create(model=model, messages=messages, **greedy(**settings))
    choice = answer.choices[0]
    return _whole(choice.message.content, choice.finish_reason, answer.usage)


def _whole(text: str, finish_reason: str, usage: Any) -> Answer:
    return Answer(text, finish_reason, usage.prompt_tokens, usage.completion_tokens, 1)


async def read(events: Any, text_of: Any) -> Answer:
    """A stream to its end; asserts the order of its events."""
    pieces: list[str] = []
    finish_reason = None
    usage = None
    async for event in events:
        assert usage is None, "an event after the usage"
        if event.usage is not None:
            assert finish_reason is not None and not event.choices
            usage = event.usage
            continue
        assert finish_reason is None, "text after the end"
        choice = event.choices[0]
        if piece := text_of(choice):
            pieces.append(piece)
        finish_reason = choice.finish_reason
    assert usage is not None, "the stream ended without its usage"
    return Answer(
        "".join(pieces), finish_reason, usage.prompt_tokens, usage.completion_tokens, len(pieces)
    )


async def disconnect(
    client: openai.AsyncOpenAI, model: str, prompt: Any, dice: random.Random, max_tokens: int
) -> str:
    """A client that goes away: before anything came, or in mid-stream, after `max_tokens` at
    most. Says which it was."""
    create: Any = client.completions.create
    settings = greedy(max_tokens=4 * max_tokens, ignore_eos=True)
    if dice.random() < 0.5:
        streamed = dice.random() < 0.5
        asked = create(model=model, prompt=prompt, stream=streamed, **settings)
        patience = dice.choice((0.0, 0.005, 0.02, 0.05, 0.1, 0.3))
        try:
            async with asyncio.timeout(patience):
                answer = await asked
        except (TimeoutError, openai.APITimeoutError):
            return "early"
        if streamed:
            await answer.close()
        return "late"
    wanted = dice.randrange(1, max_tokens)
    events = await create(model=model, prompt=prompt, stream=True, **settings)
    seen = 0
    async for _ in events:
        seen += 1
        if seen == wanted:
            break
    await events.close()
    return "mid-stream"


async def disconnect_many(
    deployment: Deployment, prompts: Sequence[Any], count: int, seed: int, max_tokens: int
) -> dict[str, int]:
    """`count` clients that go away, 16 at a time; how many of each kind there were."""
    dice = random.Random(seed)
    kinds: dict[str, int] = {}
    async with deployment.client() as client:
        gate = asyncio.Semaphore(16)

        async def one(own: random.Random) -> None:
            async with gate:
                prompt = own.choice(prompts)
                kind = await disconnect(client, deployment.name, prompt, own, max_tokens)
                kinds[kind] = kinds.get(kind, 0) + 1

        async with asyncio.timeout(3 * HANG_SECONDS), asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(one(random.Random(dice.random())))
    return kinds
