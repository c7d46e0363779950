"""Choices, adjusted logits and cached prompts over real workers."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.e2e.deployment import Deployment
from tests.e2e.reference import MARGIN, Reference, words

pytestmark = pytest.mark.e2e

PAGE = 16


async def test_choices_of_several_prompts(tiny_up: Deployment, tiny_reference: Reference) -> None:
    """Whole or streamed, and each as if it had been asked for alone."""
    prompts = [words(tiny_reference, length, seed=length) for length in (20, 50)]
    drawn = {"temperature": 1.0, "seed": 11, "max_tokens": 16, "extra_body": {"ignore_eos": True}}
    async with tiny_up.client() as client:
        create: Any = client.completions.create
        whole = await create(model=tiny_up.name, prompt=prompts, n=3, **drawn)
        events = await create(model=tiny_up.name, prompt=prompts, n=3, stream=True, **drawn)
        streamed = [""] * 6
        async for event in events:
            (choice,) = event.choices
            streamed[choice.index] += choice.text
        alone = [await create(model=tiny_up.name, prompt=p, **drawn) for p in prompts]
        greedy = await create(
            model=tiny_up.name, prompt=prompts, n=3, **{**drawn, "temperature": 0}
        )
    texts = [choice.text for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert texts == streamed and len(set(texts)) == 6
    assert [texts[0], texts[3]] == [answer.choices[0].text for answer in alone]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (70, 6 * 16)
    for index, choice in enumerate(greedy.choices):
        prompt = prompts[index // 3]
        tiny_reference.assert_greedy(prompt, choice.text, 16, 16, ignore_eos=True)


PENALTIES: dict[str, dict[str, Any]] = {
    "none": {},
    "presence": {"presence_penalty": 2},
    "frequency": {"frequency_penalty": 1.5},
    "negative": {"frequency_penalty": -0.5, "presence_penalty": -1},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": {"70": 4, "90": 4.5, "110": -100}},
    "all": {
        **{"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
        "logit_bias": {"65": 3, "80": 2.5},
    },
}


async def test_penalties_and_biases(tiny_up: Deployment, tiny_reference: Reference) -> None:
    """The greedy output of each is the one that the formulas give on the model's own logits."""
    prompt = words(tiny_reference, 40, seed=4)
    outputs = {}
    async with tiny_up.client() as client:
        for name, asked in PENALTIES.items():
            own = {key: asked[key] for key in asked.keys() & {"repetition_penalty"}}
            extra = {"ignore_eos": True, "return_token_ids": True, **own}
            plain = {key: asked[key] for key in asked.keys() - own.keys()}
            create: Any = client.completions.create
            answer = await create(
                **{"model": tiny_up.name, "prompt": prompt, "max_tokens": 40, "temperature": 0},
                **plain,
                extra_body=extra,
            )
            outputs[name] = answer.choices[0].token_ids
            assert len(outputs[name]) == 40
            assert_greedy(tiny_reference, prompt, outputs[name], asked)
    assert len({tuple(output) for output in outputs.values()}) == len(PENALTIES)


def assert_greedy(
    reference: Reference, prompt: Sequence[int], output: Sequence[int], asked: dict[str, Any]
) -> None:
    """Each token has the best logit, after all is applied, given those before."""
    rows = reference.logits([*prompt, *output])[len(prompt) - 1 : -1]
    for number, token in enumerate(output):
        row = adjusted(rows[number], prompt, output[:number], asked)
        assert row[token] >= row.max() - MARGIN, (asked, number)


def adjusted(
    row: torch.Tensor, prompt: Sequence[int], output: Sequence[int], asked: dict[str, Any]
) -> torch.Tensor:
    """As OpenAI (presence, frequency, bias) and the CTRL paper (repetition) define it, in vLLM's
    order."""
    values = row.tolist()
    penalty = asked.get("repetition_penalty", 1)
    for token in {*prompt, *output}:
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token, count in Counter(output).items():
        values[token] -= asked.get("presence_penalty", 0)
        values[token] -= asked.get("frequency_penalty", 0) * count
    for key, bias in asked.get("logit_bias", {}).items():
        values[int(key)] += bias
    return torch.tensor(values)


async def test_cached_tokens(tiny_up: Deployment, tiny_reference: Reference) -> None:
    """Whole pages, never the whole prompt, nobody else's; and the answers are the same."""
    prompt = words(tiny_reference, 10 * PAGE, seed=6)
    other = [*prompt[: 4 * PAGE + 5], *words(tiny_reference, 60, seed=7)]
    salt = uuid.uuid4().hex
    async with tiny_up.client() as client:

        async def cached(ids: list[int], salt: str) -> int:
            answer: Any = await client.completions.create(
                model=tiny_up.name,
                prompt=ids,
                max_tokens=12,
                temperature=0,
                extra_body={"cache_salt": salt, "ignore_eos": True},
            )
            tiny_reference.assert_greedy(ids, answer.choices[0].text, 12, 12, ignore_eos=True)
            assert answer.usage.prompt_tokens == len(ids)
            found: int = answer.usage.prompt_tokens_details.cached_tokens
            return found

        assert await cached(prompt, salt) == 0
        assert await cached(prompt, salt) == 9 * PAGE
        assert await cached(other, salt) == 4 * PAGE
        assert await cached(prompt, salt + "-other") == 0
