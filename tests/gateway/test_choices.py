"""Several prompts and several choices in one request."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import openai
import pytest

from pdrt.gateway.plans import choice_seed
from pdrt.protocol.gateway_messages import FinishReason, Role, Submit
from tests.gateway.conftest import Deploy, Deployment, eventually
from tests.gateway.stand_in import StandIn, begins, says


async def complete(deployment: Deployment, prompt: Any, **fields: Any) -> Any:
    return await deployment.client.completions.create(
        model="tiny", prompt=prompt, max_tokens=fields.pop("max_tokens", 64), **fields
    )


async def test_prompts_of_all_kinds_in_one_request(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = lambda submit: says(decode, submit.token_ids, cached=2)(submit)
    prompts = ["one", deployment.ids("number two"), "three 🙂"]
    done = await complete(deployment, prompts)
    assert [c.index for c in done.choices] == [0, 1, 2]
    assert [c.text for c in done.choices] == ["one", "number two", "three 🙂"]
    tokens = sum(len(deployment.ids(text)) for text in ("one", "number two", "three 🙂"))
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (tokens, tokens)
    assert done.usage.prompt_tokens_details.cached_tokens == 6


async def test_choices_are_ordered_by_prompt_and_then_by_number(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = lambda submit: says(decode, submit.token_ids)(submit)
    done = await complete(deployment, ["ab", "cd"], n=3)
    assert [(c.index, c.text) for c in done.choices] == [
        (0, "ab"), (1, "ab"), (2, "ab"), (3, "cd"), (4, "cd"), (5, "cd")
    ]  # fmt: skip
    size = len(deployment.ids("ab")) + len(deployment.ids("cd"))
    assert done.usage.prompt_tokens == size, "a prompt counts once, however many choices it has"
    assert done.usage.completion_tokens == 3 * size


async def test_of_one_prompts_choices_the_least_cached_one_counts(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    cached = iter([3, 0, 3])
    output = deployment.ids("a")

    def answer(submit: Submit) -> None:
        says(decode, output, cached=next(cached))(submit)

    decode.on_submit = answer
    done = await complete(deployment, "a prompt", n=3)
    assert done.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_given_seed_is_the_first_choices_and_the_others_follow_from_it(
    deployment: Deployment,
) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, deployment.ids("a"))
    for _ in range(2):
        await complete(deployment, ["a", "b"], n=2, seed=7)
    seeds = [submit.sampling.seed for submit in decode.submits]
    assert seeds == 4 * [7, choice_seed(7, 1)]
    decode.submits.clear()
    await complete(deployment, ["a", "b"], n=2)
    assert len({submit.sampling.seed for submit in decode.submits}) == 4


def test_seeds_of_choices_are_far_apart() -> None:
    seeds = {choice_seed(seed, i) for seed in (0, 1, 2, 2**64 - 1) for i in range(100)}
    assert len(seeds) == 400 and all(0 <= seed < 2**64 for seed in seeds)
    assert choice_seed(5, 0) == 5


@pytest.mark.parametrize("is_chat", [False, True])
async def test_streams_interleave_by_index(deployment: Deployment, is_chat: bool) -> None:
    _, decode = await deployment.pair()
    output = deployment.ids("abcd")
    fields: dict[str, Any] = {"stream": True, "n": 3, "stream_options": {"include_usage": True}}
    asking = deployment.chat(**fields) if is_chat else complete(deployment, "x", **fields)
    task = asyncio.create_task(asking)
    await eventually(lambda: len(decode.submits) == 3, "three choices")
    texts: dict[int, str] = defaultdict(str)
    ends: dict[int, str] = {}

    def note(chunk: Any) -> None:
        for choice in chunk.choices:
            assert choice.index not in ends
            texts[choice.index] += (choice.delta.content or "") if is_chat else choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason

    chunks = None
    for position, token in enumerate(output):
        for submit in decode.submits:
            decode.tokens(submit.request, position, [token])
        chunks = chunks or aiter(await task)
        while texts != dict.fromkeys(range(3), "abcd"[: position + 1]):
            note(await anext(chunks))
    for submit in reversed(decode.submits):
        decode.finish(submit.request, FinishReason.STOP)
    assert chunks is not None
    async for chunk in chunks:
        note(chunk)
        usage = chunk.usage
    assert ends == dict.fromkeys(range(3), "stop")
    assert usage.completion_tokens == 3 * len(output)
    prompt = deployment.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert usage.prompt_tokens == (len(prompt) if is_chat else 1)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_one_choice_that_fails_fails_all_and_the_others_are_cancelled(
    deployment: Deployment, is_stream: bool
) -> None:
    _, decode = await deployment.pair()

    def answer(submit: Submit) -> None:
        begins(decode, deployment.ids("abc"), 1)(submit)
        if len(decode.submits) == 3:
            decode.finish(submit.request, FinishReason.FAILED, detail="broken")

    decode.on_submit = answer
    with pytest.raises(openai.APIError, match="Choice 2: broken"):
        if is_stream:
            async for _ in await deployment.chat(n=3, stream=True):
                pass
        else:
            await deployment.chat(n=3)
    await eventually(lambda: len(decode.cancels) == 2, "the others are cancelled")
    failed = decode.submits[2].request
    assert failed not in [cancel.request for cancel in decode.cancels]


async def test_a_choice_that_stops_early_does_not_end_the_others(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    outputs = [deployment.ids("a<end>b"), deployment.ids("long enough")]

    def answer(submit: Submit) -> None:
        says(decode, outputs[len(decode.submits) - 1])(submit)

    decode.on_submit = answer
    done = await complete(deployment, "x", n=2, stop="<end>")
    assert [c.text for c in done.choices] == ["a", "long enough"]
    assert done.usage.completion_tokens < sum(len(output) for output in outputs)


async def test_choices_count_against_the_requests_in_flight(deploy: Deploy) -> None:
    async with deploy(requests_max=4) as deployment:
        _, decode = await deployment.pair()
        with pytest.raises(openai.BadRequestError) as caught:
            await deployment.chat(n=5)
        assert caught.value.param == "n"
        decode.on_submit = says(decode, deployment.ids("a"))
        assert len((await deployment.chat(n=4)).choices) == 4
        decode.on_submit = lambda submit: None
        stream = await _started(deployment, decode)
        with pytest.raises(openai.RateLimitError):
            await deployment.chat(n=3)
        await stream.close()


async def _started(deployment: Deployment, decode: StandIn) -> Any:
    decode.on_submit = begins(decode, deployment.ids("abc"), 1)
    stream = await deployment.chat(n=2, stream=True)
    await anext(aiter(stream))
    return stream


async def test_choices_are_bounded(deploy: Deploy) -> None:
    async with deploy(api={"choices_max": 4}) as deployment:
        await deployment.pair()
        cases = (({"n": 5}, "x", "n"), ({"n": 2}, ["a"] * 3, "n"), ({}, ["a"] * 5, "prompt"))
        for fields, prompt, param in cases:
            with pytest.raises(openai.BadRequestError) as caught:
                await complete(deployment, prompt, **fields)
            assert caught.value.param == param


async def test_a_client_that_leaves_cancels_every_choice(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    stream = await _started(deployment, decode)
    await stream.close()
    await eventually(lambda: len(decode.cancels) == 2, "both are cancelled")
    assert {cancel.reason for cancel in decode.cancels} == {"client_gone"}


async def test_each_choice_has_its_own_attempts(deployment: Deployment) -> None:
    """One of two workers refuses everything: all choices are answered by the other."""
    _, bad = await deployment.pair()
    good = deployment.stand_in(Role.DECODE)
    await deployment.known(good)
    output = deployment.ids("fine")
    good.on_submit = says(good, output)
    bad.on_submit = lambda submit: bad.finish(submit.request, FinishReason.UNAVAILABLE)
    done = await complete(deployment, ["a", "b"], n=2)
    assert [c.text for c in done.choices] == ["fine"] * 4


async def test_request_ids_of_choices(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, deployment.ids("a"))
    await complete(deployment, ["a", "b"], extra_headers={"x-request-id": "mine"})
    await complete(deployment, "a", extra_headers={"x-request-id": "alone"})
    ids = [submit.context.request_id for submit in decode.submits]
    assert ids == ["mine-0", "mine-1", "alone"]


async def test_continuous_usage(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    output = deployment.ids("abcd")
    decode.on_submit = says(decode, output, cached=1)
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await complete(deployment, "x", stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == len(output) and counts[0] >= 1
    assert all(chunk.usage.prompt_tokens == 1 for chunk in chunks)
