"""When requests are sent: as the ones before end, or at random times whatever became of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from pdrt.cli.bench.client import Sample

Body = dict[str, Any]
Send = Callable[[Body], Awaitable[Sample]]

FIRST_TOKEN_ID = 100
"""Those below are often special."""
_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word"
)
WORDS = _TEXT.split()
"""One token each with most tokenizers."""


class Load(msgspec.Struct, frozen=True):
    """Exactly one of the two."""

    concurrency: int | None = None
    """Closed loop: so many clients, each with one request at a time."""
    rate: float | None = None
    """Open loop: requests a second, on average."""

    @property
    def name(self) -> str:
        return f"c{self.concurrency}" if self.rate is None else f"{self.rate:g}/s"


class Shape(msgspec.Struct, frozen=True):
    """What every request asks for."""

    model: str
    prompt_tokens: int
    output_tokens: int
    vocabulary: int
    ignore_eos: bool


class Run(msgspec.Struct, frozen=True):
    """What came of a row's requests."""

    samples: tuple[Sample, ...]
    seconds: float
    """From the first request sent until the last one ended."""
    late_seconds: float = 0.0
    """How late the latest request was sent, against the times drawn: a load generator that cannot
    keep up offers less load than it says."""


def completion_body(shape: Shape, draw: random.Random) -> Body:
    """Random token ids: no two prompts begin alike, so that no prefix cache helps."""
    prompt = [draw.randrange(FIRST_TOKEN_ID, shape.vocabulary) for _ in range(shape.prompt_tokens)]
    return _common(shape) | {"prompt": prompt}


def chat_body(shape: Shape, draw: random.Random) -> Body:
    """Random words, about a token each."""
    text = words(shape.prompt_tokens, draw)
    return _common(shape) | {"messages": [{"role": "user", "content": text}]}


def text_body(shape: Shape, draw: random.Random) -> Body:
    """Random words for the completions API: an endpoint may take no token ids."""
    return _common(shape) | {"prompt": words(shape.prompt_tokens, draw)}


def words(count: int, draw: random.Random) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(count))


def _common(shape: Shape) -> Body:
    body: Body = {
        "model": shape.model,
        "max_tokens": shape.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return body | {"ignore_eos": True} if shape.ignore_eos else body


async def closed_loop(send: Send, bodies: list[Body], concurrency: int) -> Run:
    """`concurrency` clients; each sends its next request when the last one has ended."""
    waiting, samples = list(reversed(bodies)), list[Sample]()

    async def client() -> None:
        while waiting:
            samples.append(await send(waiting.pop()))

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(bodies))):
            group.create_task(client())
    return Run(tuple(samples), time.perf_counter() - began)


def poisson_times(rate: float, count: int, draw: random.Random) -> list[float]:
    """`count` moments, in seconds from the first one, `rate` a second on average."""
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += draw.expovariate(rate)
    return times


async def open_loop(send: Send, bodies: list[Body], times: list[float]) -> Run:
    """Each request at its time, however many are still running."""
    began = time.perf_counter()
    late = 0.0
    async with asyncio.TaskGroup() as group:
        tasks = []
        for body, at in zip(bodies, times, strict=True):
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            late = max(late, time.perf_counter() - began - at)
            tasks.append(group.create_task(_one(send, body)))
    return Run(tuple(task.result() for task in tasks), time.perf_counter() - began, late)


async def _one(send: Send, body: Body) -> Sample:
    return await send(body)
