"""Completions over real HTTP, driven by the official client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdrt.protocol.gateway_messages import FinishReason, Submit
from tests.gateway.conftest import Deployment, eventually
from tests.gateway.stand_in import says
from tests.model.tiny import EOS_ID

EMOJI = "héllo 👩‍👩‍👧 🙂 end"


async def test_chat_in_one_piece(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    output = deployment.ids(EMOJI)
    decode.on_submit = says(decode, output, cached=3)
    response = await deployment.client.chat.completions.with_raw_response.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}]
    )
    assert response.headers["x-pdrt-decode"] == decode.name
    chat = response.parse()
    assert chat.object == "chat.completion" and chat.id.startswith("chatcmpl-")
    (choice,) = chat.choices
    assert (choice.message.role, choice.message.content) == ("assistant", EMOJI)
    assert choice.finish_reason == "stop"
    (submit,) = decode.submits
    prompt = deployment.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert submit.token_ids == tuple(prompt)
    assert submit.sampling.max_tokens == 512 - len(prompt)
    assert chat.usage.prompt_tokens == len(prompt)
    assert chat.usage.completion_tokens == len(output)
    assert chat.usage.total_tokens == len(prompt) + len(output)
    assert chat.usage.prompt_tokens_details.cached_tokens == 3


async def test_chat_streamed(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    output = deployment.ids(EMOJI)
    decode.on_submit = says(decode, output, cached=1)
    stream = await deployment.chat(stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    *texts, last, usage = chunks
    assert "".join(c.choices[0].delta.content for c in texts) == EMOJI
    assert all(c.choices[0].finish_reason is None and c.usage is None for c in texts)
    assert last.choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert usage.usage.completion_tokens == len(output)
    assert usage.usage.prompt_tokens_details.cached_tokens == 1
    assert len({(c.id, c.model, c.object) for c in chunks}) == 1


async def test_a_stream_without_usage_has_none(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, deployment.ids("ab"))
    chunks = [chunk async for chunk in await deployment.chat(stream=True)]
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


async def test_completion_of_text_and_of_token_ids(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, deployment.ids("x" * 30))
    for prompt in ("The quick", deployment.ids("The quick"), ["The quick"]):
        done = await deployment.client.completions.create(model="tiny", prompt=prompt)
        assert done.choices[0].text == "x" * 16
        assert done.choices[0].finish_reason == "length"
        assert done.usage.completion_tokens == 16
        assert done.object == "text_completion" and done.id.startswith("cmpl-")
    assert len({submit.token_ids for submit in decode.submits}) == 1
    stream = await deployment.client.completions.create(
        model="tiny", prompt="The quick", stream=True, max_tokens=3
    )
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "xxx"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_no_tokens_wanted(deployment: Deployment, is_stream: bool) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, deployment.ids("abc"))
    answer: Any = await deployment.client.completions.create(
        model="tiny", prompt="The quick", max_tokens=0, stream=is_stream
    )
    chunks = [chunk async for chunk in answer] if is_stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == ""
    assert chunks[-1].choices[0].finish_reason == "length"
    if not is_stream:
        assert answer.usage.completion_tokens == 0 and answer.usage.prompt_tokens > 0


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_stop_string_across_tokens(deployment: Deployment, is_stream: bool) -> None:
    _, decode = await deployment.pair()
    before, stop, after = "one two ", "thr🙂", "ee four five"
    output = deployment.ids(before) + deployment.ids(stop) + deployment.ids(after)
    counted = len(deployment.ids(before) + deployment.ids(stop))
    assert len(deployment.ids(stop)) > 3
    decode.on_submit = lambda submit: decode.tokens(submit.request, 0, output, cached=2)
    answer = await deployment.chat(stop=["zzz", stop], stream=is_stream, **_usage(is_stream))
    if is_stream:
        chunks = [chunk async for chunk in answer]
        text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
        reason, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
    else:
        text, usage = answer.choices[0].message.content, answer.usage
        reason = answer.choices[0].finish_reason
    assert (text, reason) == (before, "stop")
    assert usage.completion_tokens == counted
    assert usage.prompt_tokens_details.cached_tokens == 2
    await eventually(lambda: decode.cancels, "cancelled upstream")
    assert decode.cancels[0].reason == "stop_string"


def _usage(is_stream: bool) -> dict[str, Any]:
    return {"stream_options": {"include_usage": True}} if is_stream else {}


async def test_text_held_back_for_a_stop_string_comes_at_the_end(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, deployment.ids("a <en"), FinishReason.LENGTH)
    stream = await deployment.chat(stop="<end>", stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "a <en"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_the_token_that_ends_the_output_is_counted_but_not_shown(
    deployment: Deployment,
) -> None:
    _, decode = await deployment.pair()
    output = [*deployment.ids("a"), *deployment.ids("q")]
    decode.on_submit = says(decode, output)
    chat = await deployment.chat(extra_body={"stop_token_ids": [output[-1]]})
    assert chat.choices[0].message.content == "a"
    assert chat.usage.completion_tokens == 2


async def test_sampling_reaches_the_worker(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, deployment.ids("a"))
    await deployment.chat(
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=-1,
        user="me",
        n=1,
        logprobs=False,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"7": -100, "5": 1.5},
        extra_body={
            "top_k": 4,
            "min_p": 0.1,
            "ignore_eos": True,
            "min_tokens": 1,
            "repetition_penalty": 1.5,
            "cache_salt": "mine",
        },
        extra_headers={"X-Request-Timeout": "5"},
    )
    (submit,) = decode.submits
    sampling = submit.sampling
    assert (sampling.max_tokens, sampling.min_tokens) == (7, 1)
    assert (sampling.temperature, sampling.top_p) == (0.5, 0.9)
    assert (sampling.top_k, sampling.min_p, sampling.ignore_eos) == (4, 0.1, True)
    assert sampling.seed == 2**64 - 1
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.repetition_penalty == 1.5
    assert sampling.logit_bias == ((5, 1.5), (7, -100.0))
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.grammar) == (None, None, None)
    assert (submit.cache_salt, submit.context.request_id != "") == ("mine", True)
    assert 4 < submit.seconds_max <= 5


async def test_what_ends_the_output_may_be_a_part_of_it(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    output = deployment.ids("ab<end>cd")
    decode.on_submit = says(decode, output)
    body = {"include_stop_str_in_output": True}
    for is_stream in (False, True):
        text, _, _ = await _complete(deployment, is_stream, stop="<end>", extra_body=body)
        assert text == "ab<end>"
    decode.on_submit = says(decode, [*deployment.ids("a"), EOS_ID])
    for extra, expected in (
        ({}, "a"),
        ({"skip_special_tokens": False}, "a"),
        ({"include_stop_str_in_output": True}, "a"),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "a<|im_end|>"),
    ):
        text, _, _ = await _complete(deployment, False, extra_body=extra)
        assert text == expected


async def _complete(deployment: Deployment, is_stream: bool, **fields: Any) -> tuple[str, str, Any]:
    done = await deployment.client.completions.create(
        model="tiny", prompt="x", max_tokens=64, stream=is_stream, **fields
    )
    chunks = [chunk async for chunk in done] if is_stream else [done]
    text = "".join(chunk.choices[0].text for chunk in chunks)
    return text, chunks[-1].choices[0].finish_reason, chunks[-1].usage


async def test_text_parts_and_the_developer_role(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, deployment.ids("a"))
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    await deployment.chat(
        messages=[{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    )
    expected = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    prompt = deployment.tokenizer.apply_chat_template(expected)
    assert decode.submits[0].token_ids == tuple(prompt)


async def test_a_big_prompt_is_tokenized_beside_the_loop(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    with pytest.raises(Exception, match="maximum context length is 512"):
        await deployment.chat("word " * 5000)
    assert decode.submits == []


async def test_each_output_is_its_own(deployment: Deployment) -> None:
    _, decode = await deployment.pair()

    def echo(submit: Submit) -> None:
        says(decode, submit.token_ids)(submit)

    decode.on_submit = echo
    prompts = [f"number {i} 🙂" for i in range(30)]
    done = await asyncio.gather(
        *[
            deployment.client.completions.create(model="tiny", prompt=prompt, max_tokens=64)
            for prompt in prompts
        ]
    )
    assert [d.choices[0].text for d in done] == prompts
    for prompt, one in zip(prompts, done, strict=True):
        assert one.usage.prompt_tokens == len(deployment.ids(prompt))
