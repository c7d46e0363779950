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
LASTING_TOKENS = 1000
"""Of streams that something must happen in the middle of: some tenths of a second on any machine,
where what happens takes some hundredths."""
ENDLESS_TOKENS = 8000
LONG_PROMPT_TOKENS = 8000
"""Of prompts that something must happen in the middle of."""


class Streams:
    """Greedy streams, as a context that ends when they have ended; compared afterwards."""

    def __init__(self, deployment: Deployment, tokens: int = STREAM_TOKENS) -> None:
        """`tokens`: of each."""
        self._client = deployment.client()
        self._model = deployment.name
        self._stack = contextlib.AsyncExitStack()
        self._tokens = tokens
        self._tasks: list[tuple[list[int], list[int], asyncio.Task[Answer]]] = []
        """Prompt, token ids as they came, and all else."""

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
            output: list[int] = []
            task = self._group.create_task(self._stream(prompt, output, begun))
            self._tasks.append((prompt, output, task))
        for begun in events:
            await begun.wait()

    async def _stream(self, prompt: list[int], output: list[int], begun: asyncio.Event) -> Answer:
        create: Any = self._client.completions.create
        events = await create(
            model=self._model,
            prompt=prompt,
            stream=True,
            stream_options={"include_usage": True},
            **greedy(max_tokens=self._tokens, ignore_eos=True, return_token_ids=True),
        )

        def text_of(choice: Any) -> str:
            output.extend(choice.token_ids or ())
            begun.set()
            return str(choice.text)

        return await read(events, text_of)

    def assert_unharmed(self, reference: Reference) -> None:
        """Every stream went on to its end: no token twice, none missing."""
        for prompt, output, task in self._tasks:
            answer = task.result()
            assert answer.completion_tokens == len(output) == self._tokens
            assert answer.finish_reason == "length"
            assert answer.text == reference.decode(output)
            reference.assert_likeliest(prompt, output)


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
