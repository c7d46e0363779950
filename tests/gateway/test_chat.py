"""Chat with tools, reasoning and formats: what reaches the worker, and what comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from pdrt.model.tokenizer import Tokenizer
from pdrt.protocol.gateway_messages import FinishReason, Submit
from pdrt.sampling import GrammarKind
from tests.gateway.conftest import Deploy, Deployment
from tests.gateway.stand_in import says
from tests.model.templates import TEMPLATES
from tests.model.tiny import make_tokenizer

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris 🙂"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    made = {}
    for name in ("hermes", "r1"):
        directory: Path = tmp_path_factory.mktemp(name)
        inner = make_tokenizer()
        inner.chat_template = TEMPLATES[name]
        inner.save_pretrained(directory)
        made[name] = Tokenizer(directory)
    return made


def answers(deployment: Deployment, text: str, end: FinishReason = FinishReason.STOP) -> None:
    decode = deployment.stand_ins[1]
    decode.on_submit = says(decode, deployment.ids(text), end)


class Joined:
    """A stream, put together again."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[dict[str, str]] = []
        self.finish_reason: str | None = None

    def note(self, chunk: Any) -> None:
        (choice,) = chunk.choices
        self.finish_reason = choice.finish_reason or self.finish_reason
        self.content += choice.delta.content or ""
        self.reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(self.calls) and call.type == "function"
                self.calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            self.calls[call.index]["arguments"] += call.function.arguments or ""


async def joined(stream: Any) -> Joined:
    made = Joined()
    async for chunk in stream:
        made.note(chunk)
    return made


async def test_a_tool_call_in_one_piece_and_streamed(
    deploy: Deploy, tokenizers: dict[str, Tokenizer]
) -> None:
    async with deploy(tokenizer=tokenizers["hermes"], max_model_len=2048) as deployment:
        await deployment.pair()
        answers(deployment, "I look. " + CALL)
        chat = await deployment.chat(tools=[WEATHER])
        (choice,) = chat.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content.strip() == "I look."
        (call,) = choice.message.tool_calls
        assert call.type == "function" and call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Paris 🙂"}
        stream = await joined(await deployment.chat(tools=[WEATHER], stream=True))
        assert stream.finish_reason == "tool_calls" and stream.content.strip() == "I look."
        (streamed,) = stream.calls
        assert streamed["arguments"] == call.function.arguments
        assert streamed["name"] == "weather" and streamed["id"] != call.id
        submit = deployment.stand_ins[1].submits[0]
        assert "weather in a city" in deployment.tokenizer.decode(submit.token_ids, False)
        assert submit.sampling.grammar is None


async def test_a_conversation_with_calls_goes_through_the_template(
    deploy: Deploy, tokenizers: dict[str, Tokenizer]
) -> None:
    async with deploy(tokenizer=tokenizers["hermes"], max_model_len=2048) as deployment:
        await deployment.pair()
        answers(deployment, "Sunny.")
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
        }
        chat = await deployment.chat(
            tools=[WEATHER],
            messages=[
                {"role": "user", "content": "weather?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
            ],
        )
        assert chat.choices[0].message.content == "Sunny."
        assert chat.choices[0].message.tool_calls is None
        assert chat.choices[0].finish_reason == "stop"
        submit = deployment.stand_ins[1].submits[0]
        text = deployment.tokenizer.decode(submit.token_ids, False)
        assert '"arguments": {"city": "Oslo"}' in text
        assert "<tool_response>\nsun\n</tool_response>" in text


async def test_a_forced_call_is_a_grammar(deploy: Deploy, tokenizers: dict[str, Tokenizer]) -> None:
    async with deploy(tokenizer=tokenizers["hermes"], max_model_len=2048) as deployment:
        await deployment.pair()
        answers(deployment, CALL)
        named = {"type": "function", "function": {"name": "weather"}}
        for choice in ("required", named):
            chat = await deployment.chat(tools=[WEATHER], tool_choice=choice)
            assert chat.choices[0].message.content is None
            assert chat.choices[0].message.tool_calls[0].function.name == "weather"
        for submit in deployment.stand_ins[1].submits:
            assert submit.sampling.grammar is not None
            assert "weather" in submit.sampling.grammar.text
        chat = await deployment.chat(tools=[WEATHER], tool_choice="none")
        assert chat.choices[0].message.content == CALL


async def test_logprobs_of_a_call_are_of_all_its_tokens(
    deploy: Deploy, tokenizers: dict[str, Tokenizer]
) -> None:
    async with deploy(tokenizer=tokenizers["hermes"], max_model_len=2048) as deployment:
        await deployment.pair()
        answers(deployment, CALL)
        stream = await deployment.chat(tools=[WEATHER], logprobs=True, stream=True)
        content = []
        async for chunk in stream:
            if chunk.choices[0].logprobs is not None:
                content += chunk.choices[0].logprobs.content
        assert b"".join(bytes(one.bytes) for one in content).decode() == CALL


async def test_reasoning_is_told_from_the_answer(
    deploy: Deploy, tokenizers: dict[str, Tokenizer]
) -> None:
    async with deploy(tokenizer=tokenizers["r1"]) as deployment:
        await deployment.pair()
        answers(deployment, "hmm 🙂</think>\n\nThe answer")
        chat = await deployment.chat()
        message = chat.choices[0].message
        assert message.content.strip() == "The answer"
        assert message.reasoning_content.strip() == "hmm 🙂"
        stream = await joined(await deployment.chat(stream=True))
        assert (stream.content, stream.reasoning) == (message.content, message.reasoning_content)
        hidden = await deployment.chat(extra_body={"include_reasoning": False})
        assert not hasattr(hidden.choices[0].message, "reasoning_content")
        assert hidden.choices[0].message.content == message.content
        assert hidden.usage.completion_tokens == chat.usage.completion_tokens


async def test_formats_reach_the_worker(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, deployment.ids("{}"))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    json_schema = {"name": "it", "schema": schema, "strict": True}
    for fields, kind in (
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_OBJECT),
        (
            {"response_format": {"type": "json_schema", "json_schema": json_schema}},
            GrammarKind.JSON_SCHEMA,
        ),
        ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX),
        ({"guided_json": schema}, GrammarKind.JSON_SCHEMA),
        ({"guided_regex": "[0-9]+"}, GrammarKind.REGEX),
        ({"guided_grammar": 'root ::= "a"'}, GrammarKind.EBNF),
    ):
        await deployment.chat(extra_body=fields)
        await deployment.client.completions.create(model="tiny", prompt="x", extra_body=fields)
        for submit in decode.submits:
            assert submit.sampling.grammar is not None
            assert submit.sampling.grammar.kind is kind, fields
        decode.submits.clear()
    await deployment.chat(response_format={"type": "text"})
    assert decode.submits[0].sampling.grammar is None


async def test_a_bad_grammar_is_named_and_nothing_is_computed(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    deep: Any = {}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}}
    for fields, param in (
        ({"guided_json": deep}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, None),
        ({"guided_grammar": "x" * 100_000}, "guided_grammar"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await deployment.chat(extra_body=fields)
        if param is not None:
            assert caught.value.param is not None and caught.value.param.startswith(param)
    assert decode.submits == []


async def test_a_grammar_that_no_worker_can_compile_is_the_clients_error(
    deployment: Deployment,
) -> None:
    _, decode = await deployment.pair()

    def refuse(submit: Submit) -> None:
        decode.finish(submit.request, FinishReason.REJECTED, detail="regex: unmatched (")

    decode.on_submit = refuse
    with pytest.raises(openai.BadRequestError, match="unmatched") as caught:
        await deployment.chat(extra_body={"guided_regex": "("})
    assert caught.value.param == "guided_regex"


async def test_template_fields(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, deployment.ids("a"))
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}]
    await deployment.chat(messages=begun, extra_body={"continue_final_message": True})
    await deployment.chat(extra_body={"add_generation_prompt": False})
    await deployment.chat(extra_body={"add_special_tokens": False})
    texts = [deployment.tokenizer.decode(s.token_ids, False) for s in decode.submits]
    assert texts[0].endswith("assistant\nI am")
    assert texts[1].endswith("<|im_end|>\n") and texts[2].endswith("assistant\n")
    with pytest.raises(openai.BadRequestError) as caught:
        await deployment.chat(extra_body={"chat_template_kwargs": {"messages": []}})
    assert caught.value.param == "chat_template_kwargs"
    with pytest.raises(openai.BadRequestError) as caught:
        await deployment.chat(tools=[WEATHER])
    assert caught.value.param == "tools", "a template without tools cannot show them"
