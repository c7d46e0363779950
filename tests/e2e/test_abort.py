"""Requests that end early: compute stops, the lease is revoked, both pools are whole."""

from __future__ import annotations

import asyncio
import json
import socket

import openai
import pytest

from tests.e2e.clients import complete
from tests.e2e.deployment import HANG_SECONDS, Deployment, until
from tests.e2e.reference import Reference, words
from tests.e2e.streams import (
    ENDLESS_TOKENS,
    LONG_PROMPT_TOKENS,
    assert_serves,
    stream_without_end,
)

pytestmark = pytest.mark.e2e


def outcomes(deployment: Deployment) -> dict[tuple[str, str], float]:
    """How many requests ended how, by role."""
    found: dict[tuple[str, str], float] = {}
    for name, labels, value in deployment.metrics():
        if name == "pdrt_requests_total":
            key = labels["role"], labels["outcome"]
            found[key] = found.get(key, 0) + value
    return found


def changes(deployment: Deployment, before: dict[tuple[str, str], float]) -> dict[str, float]:
    """As `role outcome`, what has been counted since."""
    now = outcomes(deployment)
    return {
        " ".join(key): value - before.get(key, 0)
        for key, value in now.items()
        if value > before.get(key, 0)
    }


async def test_a_client_that_leaves_in_mid_stream(
    tiny_up: Deployment, tiny_reference: Reference
) -> None:
    before = outcomes(tiny_up)
    async with tiny_up.client() as client, asyncio.timeout(HANG_SECONDS):
        begun = asyncio.Event()
        stream = stream_without_end(client, tiny_up.name, [5] * 40, begun)
        task = asyncio.create_task(stream)
        await begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not tiny_up.troubles(), "whole")
    ended = changes(tiny_up, before)
    assert ended["gateway client_gone"] == ended["decode cancelled"] == 1
    tiny_up.processes["up"].wait_for("request ended .*outcome=cancelled")
    await assert_serves(tiny_up, tiny_reference)


async def test_a_client_that_leaves_during_prefill(
    tiny_up: Deployment, tiny_reference: Reference
) -> None:
    """Prefill stops at the next chunk, and the pages are free when it has drained."""
    before = outcomes(tiny_up)
    prompt = words(tiny_reference, LONG_PROMPT_TOKENS)
    async with tiny_up.client() as client, asyncio.timeout(HANG_SECONDS):
        task = asyncio.create_task(complete(client, tiny_up.name, prompt, max_tokens=5))
        await until(tiny_up.in_prefill, "the first chunks")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not tiny_up.troubles(), "whole")
    ended = changes(tiny_up, before)
    assert ended["gateway client_gone"] == ended["decode cancelled"] == 1
    assert ended["prefill ended"] == 1
    up, ended_early = tiny_up.processes["up"], f"reason=client_gone prompt_tokens={len(prompt)}"
    up.wait_for(ended_early)
    up.wait_for("lease drained")
    assert f"{ended_early} computed_tokens={len(prompt)}" not in up.text()


@pytest.mark.parametrize("stream", (False, True))
async def test_a_deadline(tiny_up: Deployment, tiny_reference: Reference, stream: bool) -> None:
    """X-Request-Timeout: 504, or an error in the stream; upstream stops."""
    before = outcomes(tiny_up)
    async with tiny_up.client() as client, asyncio.timeout(HANG_SECONDS):
        with pytest.raises(openai.APIError) as caught:
            await complete(
                client,
                tiny_up.name,
                [5] * 40,
                stream=stream,
                max_tokens=ENDLESS_TOKENS,
                ignore_eos=True,
                extra_headers={"X-Request-Timeout": "0.5"},
            )
    assert "took too long" in caught.value.message or "time is up" in caught.value.message
    if not stream:
        assert isinstance(caught.value, openai.APIStatusError)
        assert caught.value.status_code == 504
    await until(lambda: not tiny_up.troubles(), "whole")
    ended = changes(tiny_up, before)
    assert ended["gateway deadline"] == 1
    assert ended.get("decode deadline", 0) + ended.get("decode cancelled", 0) == 1
    await assert_serves(tiny_up, tiny_reference)


async def test_a_stop_string(tiny_up: Deployment, tiny_reference: Reference) -> None:
    """The text ends before it, the usage with the token that completed it; decode stops."""
    prompt = words(tiny_reference, 30)
    tokens, _, _ = tiny_reference.greedy(prompt, 40, ignore_eos=True)
    whole = tiny_reference.decode(tokens)
    pairs = (tiny_reference.decode(tokens[n : n + 2]) for n in range(5, 38))
    stop = next(text for text in pairs if text.isascii() and text.isprintable() and len(text) > 2)
    before = outcomes(tiny_up)
    for stream in (False, True):
        async with tiny_up.client() as client:
            answer = await complete(
                client,
                tiny_up.name,
                prompt,
                stream=stream,
                max_tokens=ENDLESS_TOKENS,
                ignore_eos=True,
                stop=[stop],
            )
        assert answer.text == whole[: whole.index(stop)]
        assert answer.finish_reason == "stop"
        assert answer.completion_tokens < 40
    await until(lambda: not tiny_up.troubles(), "whole")
    ended = changes(tiny_up, before)
    assert ended["gateway stop"] == 2
    assert ended["decode stop"] == 2


async def test_a_client_that_does_not_read(tiny_up: Deployment, tiny_reference: Reference) -> None:
    """Its sequence pauses instead of filling buffers, others go on, and it can still leave."""
    body = {"model": tiny_up.name, "prompt": [5], "stream": True}
    content = json.dumps({**body, "max_tokens": ENDLESS_TOKENS, "ignore_eos": True}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with connection:
        connection.connect(("127.0.0.1", tiny_up.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        await until(lambda: sequence_pages(tiny_up), "its first pages")
        while True:
            before = sequence_pages(tiny_up)
            await assert_serves(tiny_up, tiny_reference)
            if sequence_pages(tiny_up) == before:
                break
        assert 0 < before < ENDLESS_TOKENS // 16
    await until(lambda: not tiny_up.troubles(), "whole")


def sequence_pages(deployment: Deployment) -> int:
    (report,) = deployment.reports("decode")
    return int(report["pages"]["sequence"])
