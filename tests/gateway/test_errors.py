"""What clients are refused, and how: always an OpenAI error body, never a 500 for their fault."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import openai
import pytest

from pdrt.gateway.errors import ApiError
from pdrt.gateway.schema.bodies import OFF
from pdrt.gateway.schema.bounds import Limits
from pdrt.gateway.schema.parsing import parse_chat, parse_completion
from pdrt.protocol.gateway_messages import FinishReason, Role
from pdrt.sampling import Sampling, SamplingDefaults
from tests.gateway.conftest import Deploy, Deployment, eventually
from tests.gateway.stand_in import begins, says

LIMITS = Limits(tokens_max=512, choices_max=8, logprobs_max=20, grammar_bytes_max=4096)
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokns": 3}, "max_tokns"),
    ({"max_tokens": "3"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**40}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens"),
    ({"max_completion_tokens": 600}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": 10**6}, "messages"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"-5": 1}}, "logit_bias"),
    ({"logit_bias": {"1000000": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e300}, "repetition_penalty"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"bad_words": ["a"]}, "bad_words"),
    ({"priority": 1}, "priority"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"length_penalty": 0.5}, "length_penalty"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
    ({"echo": True}, "echo"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
    ),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
        "messages[0].content[0].text",
    ),
    ({"model": 1}, "model"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
]


async def test_a_bad_field_is_named(deployment: Deployment) -> None:
    for fields, param in BAD_FIELDS:
        response = await deployment.http.post("/v1/chat/completions", json={**CHAT, **fields})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), (fields, error)
        assert error["type"] == "invalid_request_error" and error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[]",
        b"null",
        b'{"model": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"model": "\xff"}',
        b'{"model": "\xed\xa0\x80"}',
        b'{"model": "\\ud800"}',
        b'{"model": "\\udc00\\ud800"}',
        b'{"model": "tiny", "messages": ' + b"[" * 100_000,
        b'{"model": "tiny", "tools": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"model": "tiny", "x": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}",
        b'{"seed": ' + b"9" * 100_000 + b"}",
        b'{"\\u0000": 1}',
        b'{"' + b"x" * 100_000 + b'": 1}',
    ],
)
@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_no_body_is_more_than_a_400(parse: Any, body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body, LIMITS)
    assert caught.value.status == 400
    assert len(caught.value.body) < 1000


BAD_PROMPTS: list[tuple[Any, str]] = [
    (["a"] * 129, "at most 128"),
    ([1, "a"], "item 0 is neither"),
    ([["a"]], "item 0 is neither"),
    (["a", [1, 2.5]], "item 1 is neither"),
    (["a", []], "item 1 is neither"),
    (["a", [10**6]], "from 0 to"),
    (["a", ""], "at least one token"),
    ([1, 2.5], "neither"),
    ([1, True], "neither"),
    ([10**6], "from 0 to"),
    ([10**40], "from 0 to"),
    ([-1], "from 0 to"),
    ([], "at least 1"),
    ("", "at least one token"),
    ({}, "must be a string"),
    (None, "must be a string"),
]


async def test_bad_prompts(deployment: Deployment) -> None:
    for prompt, words in BAD_PROMPTS:
        body = {"model": "tiny", "prompt": prompt}
        response = await deployment.http.post("/v1/completions", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "prompt"), (prompt, error)
        assert words in error["message"]


def test_every_field_that_is_off_may_be_given() -> None:
    for name, values in OFF.items():
        for value in (*values, None):
            parse_chat(msgspec.json.encode({**CHAT, name: value}), LIMITS)


async def test_over_long_prompts(deployment: Deployment) -> None:
    await deployment.pair()
    for prompt, tokens in (("x" * 513, 1), ("x" * 500, 13), ("x" * 500_000, 1)):
        with pytest.raises(openai.BadRequestError) as caught:
            await deployment.client.completions.create(
                model="tiny", prompt=prompt, max_tokens=tokens
            )
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        await deployment.chat("x" * 512)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


async def test_a_missing_or_wrong_key(deployment: Deployment) -> None:
    for header in ({"authorization": "Bearer no"}, {"authorization": ""}, {"authorization": "é"}):
        raw = {k: v.encode("latin-1") for k, v in header.items()}
        for path in ("/v1/models", "/status", "/debug/check", "/nowhere"):
            response = await deployment.http.get(path, headers=raw)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/metrics"):
            assert (await deployment.http.get(path, headers=raw)).status_code == 200
    assert (await deployment.http.get("/v1/models")).status_code == 200


async def test_another_model(deployment: Deployment) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await deployment.client.completions.create(model="other", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        await deployment.client.models.retrieve("other")


async def test_unknown_paths_and_methods(deployment: Deployment) -> None:
    response = await deployment.http.get("/v2/x")
    assert response.status_code == 404 and "/v2/x" in response.json()["error"]["message"]
    response = await deployment.http.get("/v1/completions")
    assert response.status_code == 405 and response.json()["error"]["message"]


async def test_a_body_over_the_limit(deploy: Deploy) -> None:
    async with deploy(api={"body_bytes_max": 1000}) as deployment:
        response = await deployment.http.post("/v1/completions", content=b"x" * 1001)
        assert response.status_code == 413

        async def chunks() -> Any:
            for _ in range(20):
                yield b"x" * 100

        response = await deployment.http.post("/v1/completions", content=chunks())
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"


async def test_no_workers(deployment: Deployment) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        await deployment.chat()
    assert caught.value.status_code == 503
    assert "no decode worker" in caught.value.message
    assert caught.value.response.headers["retry-after"] == "1"


async def test_too_many_requests(deploy: Deploy) -> None:
    async with deploy(requests_max=2) as deployment:
        _, decode = await deployment.pair()
        running = [asyncio.create_task(deployment.chat()) for _ in range(2)]
        await eventually(lambda: len(decode.submits) == 2, "two requests run")
        with pytest.raises(openai.RateLimitError) as caught:
            await deployment.chat()
        assert caught.value.response.headers["retry-after"] == "1"
        for submit in decode.submits:
            says(decode, deployment.ids("a"))(submit)
        await asyncio.gather(*running)
        decode.on_submit = says(decode, deployment.ids("a"))
        await deployment.chat()


@pytest.mark.parametrize("detail", ["because", ""])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (FinishReason.REJECTED, 400),
        (FinishReason.OVERLOADED, 429),
        (FinishReason.FAILED, 500),
        (FinishReason.UNAVAILABLE, 503),
        (FinishReason.DEADLINE, 504),
    ],
)
async def test_what_workers_answer(
    deployment: Deployment, reason: FinishReason, status: int, is_stream: bool, detail: str
) -> None:
    """Clients are told why, also where the worker did not say it."""
    _, decode = await deployment.pair()
    decode.on_submit = lambda submit: decode.finish(submit.request, reason, detail=detail)
    with pytest.raises(openai.APIStatusError) as caught:
        await deployment.chat(stream=is_stream)
    assert caught.value.status_code == status
    assert isinstance(caught.value.body, dict)
    message = caught.value.body["message"]
    assert message and detail in message


async def test_an_error_in_mid_stream_is_an_event_and_no_finish(deployment: Deployment) -> None:
    _, decode = await deployment.pair()

    def fail(submit: Any) -> None:
        begins(decode, deployment.ids("abc"), 2)(submit)
        decode.finish(submit.request, FinishReason.FAILED, detail="broken")

    decode.on_submit = fail
    body = {**CHAT, "stream": True}
    response = await deployment.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert "event: error\ndata: " in response.text and "broken" in response.text
    assert "[DONE]" not in response.text and '"finish_reason":"' not in response.text
    with pytest.raises(openai.APIError, match="broken"):
        async for _ in await deployment.chat(stream=True):
            pass


async def test_the_clients_own_deadline(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    with pytest.raises(openai.InternalServerError) as caught:
        await deployment.chat(extra_headers={"X-Request-Timeout": "0.2"})
    assert caught.value.status_code == 504
    await eventually(lambda: decode.cancels, "cancelled upstream")
    for wrong in ("0", "-1", "nan", "soon"):
        with pytest.raises(openai.BadRequestError):
            await deployment.chat(extra_headers={"X-Request-Timeout": wrong})


async def test_a_worker_of_another_model_is_not_used(deployment: Deployment) -> None:
    deployment.stand_in(Role.PREFILL, "d2")
    decode = deployment.stand_in(Role.DECODE, "d2")
    await deployment.known(decode)
    with pytest.raises(openai.InternalServerError, match="model digest d2, the gateway's is d1"):
        await deployment.chat()


def test_the_models_own_sampling_stands_where_the_client_gives_none() -> None:
    own = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)
    limits = msgspec.structs.replace(LIMITS, sampling=own)

    def sampling(**fields: Any) -> Sampling:
        return parse_chat(json.dumps({**CHAT, **fields}).encode(), limits).sampling

    assert (
        SamplingDefaults(
            **{name: getattr(sampling(), name) for name in SamplingDefaults.__struct_fields__}
        )
        == own
    )
    given = sampling(temperature=0, top_k=-1, top_p=1, repetition_penalty=1)
    assert (given.temperature, given.top_k, given.top_p, given.repetition_penalty) == (0, 0, 1, 1)
