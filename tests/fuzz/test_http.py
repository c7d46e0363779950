"""Whatever a client sends, it is answered, in OpenAI's shape, and never with a failure of ours."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from tests.fuzz.effort import Fuzz, efforts
from tests.fuzz.hostile import BEYOND, SURROGATE, TEXTS, mutated, scrambled, value
from tests.gateway.whole import Answer, Gateway, as_json, serve


@pytest.fixture(scope="module")
def gateway(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    yield from serve(Gateway, runner, tmp_path_factory)


TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}
COMMON: dict[str, Any] = {
    "model": "tiny", "n": 2, "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 4,
    "min_p": 0.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0}, "seed": 1, "stop": ["x"], "stop_token_ids": [9], "ignore_eos": True,
    "min_tokens": 1, "skip_special_tokens": True, "cache_salt": "s", "user": "u",
    "metadata": {"a": "b"}, "return_token_ids": True, "truncate_prompt_tokens": 8,
}  # fmt: skip
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "n"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "content": "r", "tool_call_id": "1"},
    {"role": "user", "content": "more"},
]  # fmt: skip
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "hello", **COMMON},
        {"prompt": [[1, 2, 3], "two"], "echo": True, "logprobs": 2, "prompt_logprobs": 1},
        {"prompt": [1, 2], "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": "a", "guided_json": {"type": "object", "properties": {"a": {"type": "string"}}}},
        {"prompt": "a", "structured_outputs": {"choice": ["a", "b"]}, "suffix": "", "best_of": 1},
        {"prompt": "a", "guided_regex": "[a-z]+", "max_tokens": 0, "echo": True},
    ],
    "/v1/chat/completions": [
        {"messages": MESSAGES, **COMMON},
        {"messages": MESSAGES[-1:], "logprobs": True, "top_logprobs": 3, "stream": True},
        {"messages": MESSAGES[:2], "tools": [TOOL], "tool_choice": "required"},
        {
            "messages": MESSAGES[-1:],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
            },
            "chat_template_kwargs": {"enable_thinking": False},
            "max_completion_tokens": 3,
        },
        {
            "messages": [{"role": "assistant", "content": "go on"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ],
    "/tokenize": [{"prompt": "hello", "return_token_strs": True}, {"messages": MESSAGES}],
    "/detokenize": [{"tokens": [1, 2, 3], "model": "tiny"}],
}
REQUESTS = [(path, body) for path, bodies in BODIES.items() for body in bodies]


def assert_answered(answer: Answer) -> None:
    status, headers, body = answer
    assert status < 500, (status, body)
    assert headers["x-request-id"]
    media = headers["content-type"].partition(";")[0]
    if media == "text/event-stream":
        assert body.endswith(b"data: [DONE]\n\n")
        for event in body.split(b"\n\n")[:-2]:
            assert "error" not in json.loads(event.removeprefix(b"data: ")), event
        return
    assert media in ("application/json", "text/plain"), media
    if status >= 400:
        error = json.loads(body)["error"]
        assert error["message"] and isinstance(error["message"], str)
        assert error["type"] in ("invalid_request_error", "authentication_error")
        assert error["param"] is None or isinstance(error["param"], str)
        assert error.keys() == {"message", "type", "param", "code"}
        assert len(body) < 10_000, "an error does not send back what it is about"


def assert_quiet(gateway: Gateway) -> None:
    """Nothing is left of the request, and every invariant holds."""
    assert gateway.hub.broken_invariants() == []
    assert gateway.hub.is_quiet


def post(gateway: Gateway, runner: asyncio.Runner, path: str, body: bytes, *more: Any) -> Answer:
    headers = [(b"content-type", b"application/json"), (b"host", b"h"), *more]
    answer = runner.run(gateway.ask("POST", path, body, headers))
    runner.run(asyncio.sleep(0))
    return answer


@pytest.mark.parametrize(("path", "body"), [(p, b) for p, bs in BODIES.items() for b in bs])
def test_what_is_mutated_below_is_valid(
    gateway: Gateway, runner: asyncio.Runner, path: str, body: dict[str, Any]
) -> None:
    answer = post(gateway, runner, path, as_json(body))
    assert_answered(answer)
    assert answer[0] == 200, answer[2]
    assert_quiet(gateway)


def with_others(random: Random) -> Any:
    """What JSON can say, and what it should not."""
    return random.choice([*BEYOND, SURROGATE]) if random.randrange(6) == 0 else value(random)


@efforts(150)
def test_bodies_with_other_values(gateway: Gateway, runner: asyncio.Runner, fuzz: Fuzz) -> None:
    def answered(random: Random) -> None:
        path, valid = random.choice(REQUESTS)
        body = as_json(mutated(random, valid, with_others))
        assert_answered(post(gateway, runner, path, body))
        assert_quiet(gateway)

    fuzz(answered)


@efforts(80)
def test_bodies_that_are_no_json(gateway: Gateway, runner: asyncio.Runner, fuzz: Fuzz) -> None:
    def answered(random: Random) -> None:
        path, valid = random.choice(REQUESTS)
        assert_answered(post(gateway, runner, path, scrambled(random, as_json(valid))))
        assert_quiet(gateway)

    fuzz(answered)


DEEP = 100_000


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "value",
    [
        b"[" * DEEP,
        b"[" * DEEP + b"]" * DEEP,
        b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        b"1" + b"0" * DEEP,
        b"1e" + b"9" * DEEP,
        b"-" * DEEP,
        b"[" + b"0," * DEEP + b"0]",
        b"[" + b"{}," * DEEP + b"{}]",
        b"{" + b'"":0,' * DEEP + b'"":0}',
        b'"' + b"\\u0000" * DEEP + b'"',
        b'"\\ud800"',
        b'"\xff\xfe"',
    ],
    ids=["open", "deep list", "deep object", "digits", "exponent", "minus", "zeros", "objects",
         "keys", "NULs", "surrogate", "bytes"],
)  # fmt: skip
def test_large_deep_and_strange_values_anywhere(
    gateway: Gateway, runner: asyncio.Runner, path: str, value: bytes
) -> None:
    """As the whole body, and as the value of each field."""
    assert_answered(post(gateway, runner, path, value))
    valid = BODIES[path][0]
    names = [*valid, "response_format", "tools", "guided_json", "chat_template_kwargs", "logprobs"]
    for name in dict.fromkeys(names):
        others = {key: v for key, v in valid.items() if key != name}
        text = as_json(others)[:-1] + (b"," if others else b"") + b'"' + name.encode() + b'":'
        answer = post(gateway, runner, path, text + value + b"}")
        assert_answered(answer)
        # A list of token ids that is too long, or a text of NULs, may well be a field's value.
        assert answer[0] in (200, 400, 404 if name == "model" else 400), answer[2]
    assert_quiet(gateway)


HEADERS = [
    b"content-type", b"content-length", b"content-encoding", b"accept-encoding", b"origin",
    b"authorization", b"x-request-id", b"x-request-timeout", b"traceparent", b"host", b"accept",
]  # fmt: skip
VALUES = [
    b"", b"gzip", b"nan", b"inf", b"-1", b"1e400", b"0", b"9" * 30, b"gzip;q=x", b"*", b"\xff",
    b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"a" * 10_000, b"br, deflate",
]  # fmt: skip


@efforts(80)
def test_headers(gateway: Gateway, runner: asyncio.Runner, fuzz: Fuzz) -> None:
    def answered(random: Random) -> None:
        path, valid = random.choice(REQUESTS)
        body, headers = as_json(valid), []
        if random.randrange(4) == 0:
            body, headers = gzip.compress(body), [(b"content-encoding", b"gzip")]
        for _ in range(random.randrange(5)):
            noise = random.choice([*VALUES, random.randbytes(random.randrange(40))])
            headers.append((random.choice(HEADERS), noise))
        status, _, text = post(gateway, runner, path, body, *headers)
        # A patience of none is a request that is out of time.
        assert status < 500 or (status == 504 and b"took too long" in text), (status, text)
        assert_quiet(gateway)

    fuzz(answered)


PATHS = ["/v1/models/{}", "/workers/{}/drain", "/workers/{}/gone", "/{}", "/v1/{}", "/static/{}"]
METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "X"]


@efforts(80)
def test_paths_and_methods(gateway: Gateway, runner: asyncio.Runner, fuzz: Fuzz) -> None:
    def answered(random: Random) -> None:
        noise = random.randbytes(random.randrange(20)).decode("latin-1")
        where = random.choice(PATHS).format(random.choice([*TEXTS, noise]))
        method = random.choice(METHODS)
        status, headers, body = runner.run(gateway.ask(method, where, b"", [(b"host", b"h")]))
        assert status < 500, (status, body)
        if status >= 400 and method != "HEAD":
            assert json.loads(body)["error"]["message"]
        assert headers["x-request-id"]

    fuzz(answered)
