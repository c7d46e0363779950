"""Every limit on what a request may hold: at it the request is served, above it it is refused by
the name of its field, and no worker hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pdrt.gateway.chat.bodies import CHOICES_MAX, TOOLS_MAX
from pdrt.gateway.schema.bounds import (
    CACHE_SALT_CHARACTERS_MAX,
    LOGIT_BIAS_MAX,
    MESSAGES_MAX,
    STOP_CHARACTERS_MAX,
    STOP_TOKEN_IDS_MAX,
    STOPS_MAX,
)
from pdrt.protocol.gateway_messages import GatewayToWorker, Submit
from tests.gateway.whole import Gateway, as_json, serve

CONTEXT = 512
"""Of the workers; the model's own is longer."""
COMPLETION: dict[str, Any] = {"prompt": [5], "max_tokens": 1}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
KIB = 1024


class Counting(Gateway):
    """Counts what workers are asked."""

    submits = 0

    def _work(self, peer: bytes, message: GatewayToWorker) -> None:
        self.submits += isinstance(message, Submit)
        super()._work(peer, message)


@pytest.fixture(scope="module")
def gateway(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counting]:
    yield from serve(Counting, runner, tmp_path_factory)


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {**COMPLETION, **fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {**CHAT, **fields}


def tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{n}"}} for n in range(count)]


def schema(size: int) -> dict[str, Any]:
    return {"type": "string", "description": "a" * size}


AT: list[tuple[str, dict[str, Any]]] = [
    completion(prompt=[5] * (CONTEXT - 1)),
    completion(n=128),
    completion(prompt=["a"] * 128),
    completion(stop=["a"] * STOPS_MAX),
    completion(stop="a" * STOP_CHARACTERS_MAX),
    completion(stop_token_ids=[5] * STOP_TOKEN_IDS_MAX),
    completion(logprobs=20),
    completion(prompt_logprobs=20),
    completion(cache_salt="s" * CACHE_SALT_CHARACTERS_MAX),
    completion(metadata={str(n): "" for n in range(16)}),
    completion(guided_choice=["a"] * CHOICES_MAX),
    completion(guided_json=schema(60 * KIB)),
    chat(logprobs=True, top_logprobs=20),
    chat(tools=tools(TOOLS_MAX), tool_choice="none"),
]
ABOVE: list[tuple[tuple[str, dict[str, Any]], str | None]] = [
    (completion(prompt=[5] * (CONTEXT + 1)), "prompt"),
    (completion(prompt="hello world " * CONTEXT), "prompt"),
    (completion(prompt="a" * 3_000_000), "prompt"),
    (completion(prompt=[5] * CONTEXT), "max_tokens"),
    (completion(max_tokens=CONTEXT), "max_tokens"),
    (completion(max_tokens=2**63), "max_tokens"),
    (completion(n=129), "n"),
    (completion(prompt=["a", "b"], n=65), "n"),
    (completion(prompt=["a"] * 129), "prompt"),
    (completion(stop=["a"] * (STOPS_MAX + 1)), "stop"),
    (completion(stop="a" * (STOP_CHARACTERS_MAX + 1)), "stop"),
    (completion(stop_token_ids=[5] * (STOP_TOKEN_IDS_MAX + 1)), "stop_token_ids"),
    (completion(logit_bias={str(n): 1 for n in range(LOGIT_BIAS_MAX + 1)}), "logit_bias"),
    (completion(logprobs=21), "logprobs"),
    (completion(prompt_logprobs=21), "prompt_logprobs"),
    (completion(cache_salt="s" * (CACHE_SALT_CHARACTERS_MAX + 1)), "cache_salt"),
    (completion(metadata={str(n): "" for n in range(17)}), "metadata"),
    (completion(guided_choice=["a"] * (CHOICES_MAX + 1)), "guided_choice"),
    (completion(guided_json=schema(64 * KIB)), "guided_json"),
    (completion(guided_regex="a" * (64 * KIB + 1)), "guided_regex"),
    (completion(guided_grammar="root ::= " + "a" * 64 * KIB), "guided_grammar"),
    (completion(structured_outputs={"regex": "a" * (64 * KIB + 1)}), "structured_outputs.regex"),
    (chat(messages=[{"role": "user", "content": "hello " * 2 * CONTEXT}]), "messages"),
    (chat(messages=CHAT["messages"] * (CONTEXT + 1)), "messages"),
    (chat(messages=CHAT["messages"] * (MESSAGES_MAX + 1)), "messages"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (chat(n=129), "n"),
    (chat(tools=tools(TOOLS_MAX + 1)), "tools"),
    (("/detokenize", {"tokens": [5] * (CONTEXT + 1)}), "tokens"),
]


def ask(
    gateway: Gateway, runner: asyncio.Runner, path: str, body: bytes
) -> tuple[int, dict[str, Any]]:
    headers = [(b"content-type", b"application/json")]
    status, _, answer = runner.run(gateway.ask("POST", path, body, headers))
    return status, msgspec.json.decode(answer)


@pytest.mark.parametrize(("path", "body"), AT, ids=[str([*body][-1]) for _, body in AT])
def test_at_the_limit(
    gateway: Counting, runner: asyncio.Runner, path: str, body: dict[str, Any]
) -> None:
    status, answer = ask(gateway, runner, path, as_json(body))
    assert status == 200, answer


@pytest.mark.parametrize(("asked", "param"), ABOVE, ids=[str(param) for _, param in ABOVE])
def test_above_the_limit(
    gateway: Counting, runner: asyncio.Runner, asked: tuple[str, dict[str, Any]], param: str | None
) -> None:
    path, body = asked
    before = gateway.submits
    status, answer = ask(gateway, runner, path, as_json(body))
    error = answer["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    runner.run(asyncio.sleep(0))
    assert gateway.submits == before, "no worker hears of it"
    assert gateway.hub.is_quiet


def test_a_body_that_is_too_large(gateway: Counting, runner: asyncio.Runner) -> None:
    size = gateway.config.api.body_bytes_max
    body = as_json({"prompt": "a" * size})
    before = gateway.submits
    status, answer = ask(gateway, runner, "/v1/completions", body)
    assert status == 413 and str(size) in answer["error"]["message"]
    assert gateway.submits == before
