"""Log probabilities of outputs and prompts, in OpenAI's and vLLM's shapes."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest

from pdrt.gateway.logprobs import TokenNames
from pdrt.gateway.schema.answers import ChatCompletion, Completion
from pdrt.ids import RequestId
from pdrt.protocol.codec import encode, prompt_logprobs_bytes
from pdrt.protocol.gateway_messages import FinishReason, PromptLogprobs, Submit
from pdrt.sampling import TokenLogprobs
from tests.gateway.conftest import Deploy, Deployment
from tests.gateway.stand_in import StandIn, asked, says, scored
from tests.gateway.workers import GATEWAY
from tests.model.tiny import EOS_ID

TEXT = "a🙂 the end"
PROMPT = "The 🙂 fox"


async def complete(deployment: Deployment, prompt: Any = PROMPT, **fields: Any) -> Any:
    fields.setdefault("max_tokens", 64)
    return await deployment.client.completions.create(model="tiny", prompt=prompt, **fields)


def names(deployment: Deployment) -> TokenNames:
    return TokenNames(deployment.tokenizer.token_bytes)


def likely(deployment: Deployment, token: int, top: int) -> dict[str, float]:
    text = names(deployment).text
    one = scored(token, top)
    return {**{text(t): value for t, value in one.top}, text(token): one.logprob}


def check(deployment: Deployment, logprobs: Any, ids: list[int], top: int, text: str) -> None:
    """Completions' parallel lists, for tokens whose text begins `text` unless they are a prompt's
    first."""
    assert logprobs.tokens == [names(deployment).text(token) for token in ids]
    assert logprobs.token_logprobs == [scored(token, top).logprob for token in ids]
    assert logprobs.top_logprobs == [likely(deployment, token, top) for token in ids]
    check_offsets(deployment, logprobs.text_offset, ids, text)


def check_offsets(deployment: Deployment, offsets: list[int], ids: list[int], text: str) -> None:
    bytes_before = 0
    for offset, token in zip(offsets, ids, strict=True):
        # A token within a character begins where that does.
        assert len(text[:offset].encode()) <= bytes_before < len(text[: offset + 1].encode())
        bytes_before += len(deployment.tokenizer.token_bytes(token))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("top", [0, 3])
async def test_completions(deployment: Deployment, top: int, is_stream: bool) -> None:
    _, decode = await deployment.pair()
    output = deployment.ids(TEXT)
    decode.on_submit = says(decode, output, FinishReason.LENGTH)
    done = await complete(deployment, logprobs=top, stream=is_stream)
    parts = [c.choices[0] async for c in done] if is_stream else done.choices
    assert decode.submits[0].sampling.logprobs == top
    assert decode.submits[0].sampling.prompt_logprobs is None
    assert "".join(part.text for part in parts) == TEXT
    joined = joined_logprobs([part.logprobs for part in parts if part.logprobs is not None])
    check(deployment, joined, output, top, TEXT)
    assert any("\\x" in token for token in joined.tokens), "a part of a character shows its bytes"


def joined_logprobs(parts: list[Any]) -> Any:
    first, *others = parts
    for part in others:
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            getattr(first, field).extend(getattr(part, field))
    return first


@pytest.mark.parametrize("is_stream", [False, True])
async def test_chat(deployment: Deployment, is_stream: bool) -> None:
    _, decode = await deployment.pair()
    output = deployment.ids(TEXT)
    decode.on_submit = says(decode, output)
    done = await deployment.chat(logprobs=True, top_logprobs=2, stream=is_stream)
    parts = [c.choices[0] async for c in done] if is_stream else done.choices
    content = [one for part in parts if part.logprobs for one in part.logprobs.content]
    token_bytes = deployment.tokenizer.token_bytes
    assert b"".join(bytes(one.bytes) for one in content).decode() == TEXT
    for one, token in zip(content, output, strict=True):
        expected = scored(token, 2)
        assert one.logprob == expected.logprob and bytes(one.bytes) == token_bytes(token)
        assert one.token == names(deployment).text(token)
        top = [(bytes(t.bytes), t.logprob) for t in one.top_logprobs]
        assert top == [(token_bytes(t), value) for t, value in expected.top]


async def test_chat_without_the_likely_ones(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, deployment.ids("ab"))
    chat = await deployment.chat(logprobs=True)
    assert [one.top_logprobs for one in chat.choices[0].logprobs.content] == [[], []]
    assert (await deployment.chat(logprobs=False, top_logprobs=0)).choices[0].logprobs is None


async def test_a_token_that_ends_the_output_has_a_log_probability(deployment: Deployment) -> None:
    """As vLLM has it; lm-eval leaves out the last one and counts on its being there."""
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, [*deployment.ids("a"), EOS_ID])
    done = await complete(deployment, logprobs=0)
    assert done.choices[0].text == "a"
    assert len(done.choices[0].logprobs.tokens) == 2 == done.usage.completion_tokens


async def test_tokens_after_a_stop_string_have_none(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, deployment.ids("ab<end>cd"))
    done = await complete(deployment, logprobs=1, stop="<end>")
    logprobs = done.choices[0].logprobs
    assert len(logprobs.tokens) == done.usage.completion_tokens
    assert "".join(logprobs.tokens).startswith("ab<end>") and "d" not in logprobs.tokens[-1]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 64])
@pytest.mark.parametrize("top", [None, 0, 2])
async def test_echo(
    deployment: Deployment, top: int | None, max_tokens: int, is_stream: bool
) -> None:
    _, decode = await deployment.pair()
    ids, output = deployment.ids(PROMPT), deployment.ids(TEXT)
    decode.on_submit = says(decode, output, FinishReason.LENGTH)
    for prompt in (PROMPT, ids):
        done = await complete(
            deployment, prompt, echo=True, logprobs=top, max_tokens=max_tokens, stream=is_stream
        )
        parts = [c.choices[0] async for c in done] if is_stream else done.choices
        text = PROMPT + (TEXT if max_tokens else "")
        assert "".join(part.text for part in parts) == text
        assert parts[-1].finish_reason == "length"
        assert decode.submits[-1].sampling.prompt_logprobs == top
        logprobs = [part.logprobs for part in parts if part.logprobs is not None]
        if top is None:
            assert logprobs == []
            continue
        joined = joined_logprobs(logprobs)
        assert joined.token_logprobs.pop(0) is None and joined.top_logprobs.pop(0) is None
        assert joined.tokens.pop(0) == names(deployment).text(ids[0])
        shown = [*ids, *(output if max_tokens else [])]
        check_offsets(deployment, joined.text_offset, shown, text)
        assert joined.token_logprobs == [scored(token, top).logprob for token in shown[1:]]
        assert joined.top_logprobs == [likely(deployment, token, top) for token in shown[1:]]


async def test_echo_of_one_token_has_nothing_to_ask_for(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, deployment.ids("b"))
    done = await complete(deployment, "a", echo=True, logprobs=1, max_tokens=0)
    assert decode.submits[0].sampling.prompt_logprobs is None
    logprobs = done.choices[0].logprobs
    assert (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset) == (["a"], [None], [0])


async def test_a_prompt_that_was_cut_is_echoed_as_it_was_used(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, deployment.ids("!"))
    ids = deployment.ids(PROMPT)
    body = {"truncate_prompt_tokens": 2}
    done = await complete(deployment, echo=True, extra_body=body)
    assert decode.submits[0].token_ids == tuple(ids[-2:])
    assert done.choices[0].text == deployment.tokenizer.decode(ids[-2:]) + "!"
    assert done.usage.prompt_tokens == 2
    done = await complete(
        deployment, "x " * 1000, max_tokens=10, extra_body={"truncate_prompt_tokens": -1}
    )
    assert done.usage.prompt_tokens == 502


def vllm_prompt(deployment: Deployment, ids: list[int], top: int) -> list[Any]:
    text = names(deployment).text
    positions: list[Any] = [None]
    for token in ids[1:]:
        one = scored(token, top)
        ranked = {str(t): (value, rank) for rank, (t, value) in enumerate(one.top, 1)}
        ranked[str(token)] = (one.logprob, one.rank)
        positions.append(
            {
                key: {"logprob": value, "rank": rank, "decoded_token": text(int(key))}
                for key, (value, rank) in ranked.items()
            }
        )
    return positions


async def test_prompt_logprobs_in_vllms_field(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, deployment.ids("a"))
    ids = deployment.ids(PROMPT)
    done = await complete(deployment, n=2, extra_body={"prompt_logprobs": 2})
    expected = vllm_prompt(deployment, ids, 2)
    assert [choice.prompt_logprobs for choice in done.choices] == [expected, expected]
    assert [choice.text for choice in done.choices] == ["a", "a"]
    chat = await deployment.chat(n=2, extra_body={"prompt_logprobs": 0, "return_token_ids": True})
    prompt = deployment.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert chat.prompt_logprobs == vllm_prompt(deployment, prompt, 0)
    assert chat.prompt_token_ids == prompt
    assert [choice.token_ids for choice in chat.choices] == [deployment.ids("a")] * 2
    # Shown once, so asked for once.
    tops = [submit.sampling.prompt_logprobs for submit in decode.submits]
    assert tops == [2, 2, 0, None]


async def test_echo_and_the_field_may_differ(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, deployment.ids("a"))
    done = await complete(deployment, echo=True, logprobs=1, extra_body={"prompt_logprobs": 3})
    assert decode.submits[0].sampling.prompt_logprobs == 3
    (choice,) = done.choices
    ids = deployment.ids(PROMPT)
    assert choice.prompt_logprobs == vllm_prompt(deployment, ids, 3)
    assert choice.logprobs.top_logprobs[1] == likely(deployment, ids[1], 1)


async def test_tokens_as_ids(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    output = deployment.ids("ab")
    decode.on_submit = says(decode, output)
    body = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    done = await complete(deployment, logprobs=1, extra_body=body)
    (choice,) = done.choices
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in output]
    assert choice.prompt_token_ids == deployment.ids(PROMPT) and choice.token_ids == output
    stream = await complete(deployment, stream=True, extra_body={"return_token_ids": True})
    chunks = [chunk.choices[0] async for chunk in stream]
    assert [token for chunk in chunks for token in chunk.token_ids] == output
    assert chunks[0].prompt_token_ids == deployment.ids(PROMPT)
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks[1:])


async def test_answers_have_the_described_types(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, deployment.ids("ab"))
    more = {"prompt_logprobs": 1, "return_token_ids": True, "logprobs": 1, "echo": True}
    body = {"model": "tiny", "prompt": PROMPT, **more}
    response = await deployment.http.post("/v1/completions", json=body)
    made = msgspec.json.decode(response.content, type=Completion)
    assert again(made) == response.json()
    more = {"prompt_logprobs": 1, "return_token_ids": True, "logprobs": True, "top_logprobs": 1}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **more}
    response = await deployment.http.post("/v1/chat/completions", json=body)
    chat = msgspec.json.decode(response.content, type=ChatCompletion)
    assert again(chat) == response.json()


def again(made: msgspec.Struct) -> Any:
    return msgspec.json.decode(msgspec.json.encode(made))


def test_the_size_of_log_probabilities_in_a_frame_is_never_guessed_too_low() -> None:
    for top in (0, 1, 5, 20):
        worst = TokenLogprobs(-1.23456789, 2**32 - 1, ((2**32 - 1, -9.87654321),) * top)
        few, many = (
            len(encode(PromptLogprobs(_ID, GATEWAY, (worst,) * count))) for count in (1000, 2000)
        )
        assert many - few <= prompt_logprobs_bytes(1000, top)
        assert many - few > prompt_logprobs_bytes(1000, top) * 0.8


async def test_more_than_a_frame_holds_is_refused_by_name(deploy: Deploy) -> None:
    async with deploy(protocol={"frame_bytes_max": 16 * 1024}) as deployment:
        _, decode = await deployment.pair()
        decode.on_submit = says(decode, deployment.ids("a"))
        prompt = [65] * 100
        for fields, param in (
            ({"echo": True, "logprobs": 20}, "logprobs"),
            ({"extra_body": {"prompt_logprobs": 20}}, "prompt_logprobs"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await complete(deployment, prompt, **fields)
            assert caught.value.param == param
        assert decode.submits == []
        assert (await complete(deployment, prompt, echo=True, logprobs=5)).choices


async def test_more_than_an_answer_holds_is_refused(deploy: Deploy) -> None:
    async with deploy(max_model_len=1 << 20) as deployment:
        _, decode = await deployment.pair()
        decode.on_submit = says(decode, deployment.ids("a"))
        fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 20, "max_tokens": 300_000}
        with pytest.raises(openai.BadRequestError) as caught:
            await deployment.chat(**fields)
        assert caught.value.param == "logprobs"
        async for _ in await deployment.chat(**fields, stream=True):
            pass


async def test_many_log_probabilities_are_worked_on_beside_the_loop(deploy: Deploy) -> None:
    async with deploy(max_model_len=1 << 14) as deployment:
        _, decode = await deployment.pair()
        decode.on_submit = says(decode, deployment.ids("a"))
        prompt = [60 + i % 40 for i in range(5000)]
        done = await complete(deployment, prompt, echo=True, logprobs=2, max_tokens=1)
        assert len(done.choices[0].logprobs.tokens) == 5001


async def test_a_worker_that_leaves_log_probabilities_out_is_given_up(
    deployment: Deployment,
) -> None:
    _, decode = await deployment.pair()

    def answer(submit: Submit) -> None:
        decode.tokens(submit.request, 0, deployment.ids("a"))

    decode.on_submit = answer
    with pytest.raises(openai.InternalServerError, match="log probabilities came"):
        await complete(deployment, logprobs=1)


async def test_who_served(deployment: Deployment) -> None:
    prefill, decode = await deployment.pair()

    def answer(submit: Submit) -> None:
        ids = deployment.ids("a")
        more = asked(submit, ids)
        decode.prompt_logprobs(submit, prefill=prefill.worker)
        decode.tokens(submit.request, 0, ids, prefill=prefill.worker, **more)
        decode.finish(submit.request, FinishReason.STOP)

    decode.on_submit = answer
    create = deployment.client.completions.with_raw_response.create
    for fields in ({}, {"stream": True}, {"echo": True, "logprobs": 1}):
        response = await create(model="tiny", prompt="some words", **fields)
        assert response.headers["x-pdrt-prefill"] == prefill.name
        assert response.headers["x-pdrt-decode"] == decode.name


_ID = RequestId(GATEWAY, 2**32, 1)
LM_EVAL = {"model": "tiny", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}


async def test_lm_evals_loglikelihood_requests(deployment: Deployment) -> None:
    """As lm-eval's `local-completions` asks (several contexts with continuations, as token ids, in
    one request) and as its `parse_logprobs` reads the answer."""
    _, decode = await deployment.pair()
    decode.on_submit = lambda submit: score(decode, submit)
    pairs = [(deployment.ids("The capital is"), deployment.ids(" Paris.")), ([70, 72], [74, 76])]
    body = {**LM_EVAL, "prompt": [a + b for a, b in pairs], "echo": True}
    answer = (await deployment.http.post("/v1/completions", json=body)).json()
    for choice, (context, continuation) in zip(answer["choices"], pairs, strict=True):
        logprobs = choice["logprobs"]
        values = logprobs["token_logprobs"][len(context) : -1]
        tops = logprobs["top_logprobs"][len(context) : -1]
        assert sum(values) == sum(scored(token, 1).logprob for token in continuation)
        is_greedy = all(v == max(top.values()) for v, top in zip(values, tops, strict=True))
        assert is_greedy is all(token % 2 == 0 for token in continuation)


def score(worker: StandIn, submit: Submit) -> None:
    says(worker, [EOS_ID])(submit)
