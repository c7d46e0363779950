"""Clients in mid-stream, while something happens to what they are served by."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import openai

from tests.e2e.clients import Answer, complete, greedy, read
from tests.e2e.deployment import HANG_SECONDS, Deployment
from tests.e2e.reference import Reference, words

STREAM_TOKENS = 150
ENDLESS_TOKENS = 3900


class Streams:
    """Greedy streams, as a context that ends when they have ended; compared afterwards."""

    def __init__(self, deployment: Deployment) -> None:
        self._client = deployment.client()
        self._model = deployment.name
        self._stack = contextlib.AsyncExitStack()
        self._tasks: list[tuple[list[int], asyncio.Task[Answer]]] = []

    async def __aenter__(self) -> Streams:
        await self._stack.enter_async_context(self._client)
        await self._stack.enter_async_context(asyncio.timeout(HANG_SECONDS))
        self._group = await self._stack.enter_async_context(asyncio.TaskGroup())
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.__aexit__(*error)

    async def begin(self, prompts: list[list[int]]) -> None:
        """Returns once each has its first tokens."""
        events = [asyncio.Event() for _ in prompts]
        for prompt, begun in zip(prompts, events, strict=True):
            self._tasks.append((prompt, self._group.create_task(self._stream(prompt, begun))))
        for begun in events:
            await begun.wait()

    async def _stream(self, prompt: list[int], begun: asyncio.Event) -> Answer:
        create: Any = self._client.completions.create
        events = await create(
            model=self._model,
            prompt=prompt,
            stream=True,
            stream_options={"include_usage": True},
            **greedy(max_tokens=STREAM_TOKENS, ignore_eos=True),
        )

        def text_of(choice: Any) -> str:
            begun.set()
            return str(choice.text)

        return await read(events, text_of)

    def assert_unharmed(self, reference: Reference) -> None:
        """Every stream went on to its end: no token twice, none missing."""
        for prompt, task in self._tasks:
            answer = task.result()
            assert answer.completion_tokens == STREAM_TOKENS
            assert answer.finish_reason == "length"
            reference.assert_greedy(
                prompt, answer.text, STREAM_TOKENS, STREAM_TOKENS, ignore_eos=True
            )


async def stream_without_end(
    client: openai.AsyncOpenAI, model: str, prompt: list[int], begun: asyncio.Event
) -> None:
    """Longer than anybody waits for it."""
    create: Any = client.completions.create
    settings = greedy(max_tokens=ENDLESS_TOKENS, ignore_eos=True)
    events = await create(model=model, prompt=prompt, stream=True, **settings)
    async for _ in events:
        begun.set()


async def assert_serves(deployment: Deployment, reference: Reference) -> None:
    """The next answer is right."""
    prompt = words(reference, 50, seed=50)
    async with deployment.client() as client:
        answer = await complete(client, deployment.name, prompt, max_tokens=20, ignore_eos=True)
    reference.assert_greedy(prompt, answer.text, answer.completion_tokens, 20, ignore_eos=True)
