"""Requests outlive their workers: what was begun ends as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import msgspec
import openai
import pytest

from tests.e2e.clients import complete
from tests.e2e.conftest import Cluster
from tests.e2e.deployment import HANG_SECONDS, Deployment, until
from tests.e2e.reference import Reference, words
from tests.e2e.streams import LASTING_TOKENS, LONG_PROMPT_TOKENS, Streams, assert_serves

pytestmark = pytest.mark.e2e

TOKENS = 600
IGNORE_EOS = {"ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    # First: a worker's first grammar begins when all other streams would be over.
    "grammar": {
        **{"temperature": 1.0, "seed": 9},
        "extra_body": {"guided_regex": "([a-f]{4}[0-9]{3} ){72}"},
    },
    "greedy": {"temperature": 0, "extra_body": IGNORE_EOS},
    "seeded": {"temperature": 1.0, "top_p": 0.95, "seed": 7, "extra_body": IGNORE_EOS},
    "penalties": {
        **{"temperature": 0.8, "seed": 8, "presence_penalty": 0.7, "frequency_penalty": 0.4},
        "extra_body": {**IGNORE_EOS, "repetition_penalty": 1.3},
    },
}


class Streamed(msgspec.Struct, frozen=True):
    """All of one stream, token by token."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    prompt_tokens: int
    output_tokens: int


async def stream(
    client: openai.AsyncOpenAI, model: str, prompt: list[int], kind: str, begun: asyncio.Event
) -> Streamed:
    asked = dict(KINDS[kind])
    asked["extra_body"] = {**asked["extra_body"], "return_token_ids": True}
    create: Any = client.completions.create
    events = await create(
        model=model,
        prompt=prompt,
        max_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        **asked,
    )
    token_ids: list[int] = []
    text, finish_reason, usage = "", None, None
    async for event in events:
        if event.usage is not None:
            usage = event.usage
            continue
        (choice,) = event.choices
        token_ids += getattr(choice, "token_ids", None) or []
        text += choice.text
        finish_reason = choice.finish_reason or finish_reason
        if len(token_ids) > 3:
            begun.set()
    assert usage is not None
    return Streamed(
        tuple(token_ids), text, finish_reason, usage.prompt_tokens, usage.completion_tokens
    )


async def every_kind(client: openai.AsyncOpenAI, model: str, prompt: list[int]) -> list[Streamed]:
    return [await stream(client, model, prompt, kind, asyncio.Event()) for kind in KINDS]


async def scores(client: openai.AsyncOpenAI, model: str, prompt: list[int]) -> list[float]:
    """Log probabilities of the prompt's tokens and of the output's."""
    create: Any = client.completions.create
    asked = {"prompt_logprobs": 1, "ignore_eos": True}
    answer = await create(
        model=model, prompt=prompt, max_tokens=5, temperature=0, logprobs=1, extra_body=asked
    )
    (choice,) = answer.choices
    given = [
        position[str(token)]
        for token, position in zip(prompt[1:], choice.prompt_logprobs[1:], strict=True)
    ]
    return [one["logprob"] for one in given] + list(choice.logprobs.token_logprobs)


async def test_a_decode_worker_dies_under_streams_of_every_kind(
    cluster: Cluster, tiny_reference: Reference
) -> None:
    """Each kind on both workers. Token by token the same as undisturbed: none twice, none missing,
    usage exact."""
    prompt = words(tiny_reference, 40, seed=40)
    async with cluster.client() as client, asyncio.timeout(HANG_SECONDS):
        # Two at once, which go to different workers: both load what grammars need.
        works = [every_kind(client, cluster.name, prompt) for _ in range(2)]
        first, second = await asyncio.gather(*works)
        assert first == second
        undisturbed = dict(zip(KINDS, first, strict=True))
        moved = cluster.processes["gateway"].text().count("moves to decode worker")
        tasks: list[tuple[str, asyncio.Task[Streamed]]] = []
        async with asyncio.TaskGroup() as group:
            for kind in KINDS:
                # Two at once, which go to different workers.
                events = [asyncio.Event(), asyncio.Event()]
                works = [stream(client, cluster.name, prompt, kind, begun) for begun in events]
                tasks += [(kind, group.create_task(work)) for work in works]
                for begun in events:
                    await begun.wait()
            cluster.processes["decode-0"].kill()
    for kind, task in tasks:
        assert task.result() == undisturbed[kind], kind
    greedy = undisturbed["greedy"]
    assert greedy.output_tokens == len(greedy.token_ids) == TOKENS
    tiny_reference.assert_likeliest(prompt, greedy.token_ids)
    assert greedy.text == tiny_reference.decode(greedy.token_ids)
    cluster.processes["gateway"].wait_for("moves to decode worker", moved + 1)


async def test_the_only_decode_worker_dies_in_mid_stream(
    tiny_up: Deployment, tiny_reference: Reference
) -> None:
    """Its streams wait for its successor and go on; new requests are told when to come back."""
    before = tiny_up.pid_of("decode")
    assert before is not None
    async with Streams(tiny_up, LASTING_TOKENS) as streams:
        await streams.begin([words(tiny_reference, 20 + n, seed=n) for n in range(4)])
        os.kill(before, signal.SIGKILL)
        await until(lambda: not tiny_up.is_ready(), "the loss")
        async with tiny_up.client() as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await complete(client, tiny_up.name, [5], max_tokens=1)
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1
    streams.assert_unharmed(tiny_reference)
    assert tiny_up.pid_of("decode") not in (None, before)
    await until(tiny_up.is_ready, "ready again, by itself")


async def test_all_prefill_workers_die_in_the_middle_of_a_prompt(
    cluster: Cluster, tiny_reference: Reference
) -> None:
    """Decode workers compute prompts themselves while nobody else is there, and not one token of
    any as soon as somebody is."""

    def local_tokens() -> float:
        return cluster.metric("pdrt_local_prefill_tokens_total", role="decode")

    before = local_tokens()
    long = words(tiny_reference, LONG_PROMPT_TOKENS, seed=3)
    short = words(tiny_reference, 30, seed=30)
    async with Streams(cluster) as streams, cluster.client() as client:
        handed_over = await every_kind(client, cluster.name, short)
        scored = await scores(client, cluster.name, short)
        assert local_tokens() == before, "handed over, and not computed again"
        await streams.begin([words(tiny_reference, 20 + n, seed=n) for n in range(4)])
        work = complete(client, cluster.name, long, max_tokens=10, ignore_eos=True)
        task = asyncio.create_task(work)
        await until(cluster.in_prefill, "a room in prefill")
        for name in ("prefill-0", "prefill-1"):
            cluster.processes[name].kill()
        answer = await complete(client, cluster.name, short, max_tokens=10, ignore_eos=True)
        long_answer = await task
        assert await every_kind(client, cluster.name, short) == handed_over
        found = await scores(client, cluster.name, short)
        assert found == pytest.approx(scored, abs=1e-3)
    streams.assert_unharmed(tiny_reference)
    tiny_reference.assert_greedy(short, answer.text, 10, 10, ignore_eos=True)
    tiny_reference.assert_greedy(long, long_answer.text, 10, 10, ignore_eos=True)
    await until(lambda: (cluster.reasons() or [""])[0].startswith("degraded"), "what is wrong")
    assert cluster.get("/ready").status_code == 200  # type: ignore[union-attr]
    computed = local_tokens()
    assert computed > before
    await asyncio.to_thread(cluster.start_missing)
    await assert_serves(cluster, tiny_reference)
    assert local_tokens() == computed
