"""What clients ask for, and what a complete answer to it is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec

from tests.e2e.reference import Reference, words

MARGIN = 0.005
"""Of the two best logits of every greedy token: an answer computed in other batches and chunks is
the same one."""
SEEDS = range(1000)
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Answer(msgspec.Struct, frozen=True):
    """All of it; two that say the same are equal."""

    texts: tuple[str, ...]
    """By choice."""
    finish_reasons: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int


class Shape(msgspec.Struct, frozen=True):
    """A request whose answer is determined."""

    name: str
    path: str
    body: dict[str, Any]

    @property
    def choices(self) -> int:
        return int(self.body.get("n", 1))


class Shapes:
    """Every shape, what reference or calm deployment say to it, and a long one for slow readers."""

    def __init__(self, reference: Reference, output_tokens: int, long_tokens: int) -> None:
        """`reference` has the last word on the greedy ones."""
        self._reference = reference
        self._prompts: dict[str, list[int]] = {}
        length = output_tokens
        self.all = [
            self._greedy("one token", 20, 1),
            self._greedy("short", 5, length),
            self._greedy("within a page", 33, length),
            self._greedy("long prompt", 700, length),
            Shape("choices", COMPLETIONS, _sampled([*range(5, 45)], length, n=3)),
            Shape("chat", CHATS, _chat(length)),
            Shape("schema", CHATS, _chat(length) | {"response_format": _schema()}),
            Shape("penalties", COMPLETIONS, _sampled([*range(9, 90)], length, presence_penalty=1)),
        ]
        self.long = self._greedy("long answer", 9, long_tokens)

    def __iter__(self) -> Iterator[Shape]:
        return iter((*self.all, self.long))

    def _greedy(self, name: str, prompt_tokens: int, output_tokens: int) -> Shape:
        prompt = self._prompts[name] = self._clear_prompt(prompt_tokens, output_tokens)
        body = {"prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
        return Shape(name, COMPLETIONS, body)

    def _clear_prompt(self, prompt_tokens: int, output_tokens: int) -> list[int]:
        """One whose greedy answer nobody can doubt."""
        for seed in SEEDS:
            prompt = words(self._reference, prompt_tokens, seed=seed)
            _, margins, _ = self._reference.greedy(prompt, output_tokens, ignore_eos=True)
            if min(margins) > MARGIN:
                return prompt
        raise AssertionError(f"no prompt of {prompt_tokens} tokens has a clear answer")

    def assert_right(self, shape: Shape, answer: Answer) -> None:
        """Where the reference knows."""
        prompt = self._prompts.get(shape.name)
        if prompt is None:
            return
        count = shape.body["max_tokens"]
        tokens, _, _ = self._reference.greedy(prompt, count, ignore_eos=True)
        text = self._reference.decode(tokens)
        assert answer == Answer((text,), ("length",), len(prompt), count), (shape.name, answer)


def _sampled(prompt: list[int], max_tokens: int, **settings: Any) -> dict[str, Any]:
    """A seed determines the draws."""
    sampling = {"temperature": 0.7, "top_p": 0.9, "seed": 11, "ignore_eos": True}
    return {"prompt": prompt, "max_tokens": max_tokens, **sampling, **settings}


def _chat(max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 0}


def _schema() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


def salted(shape: Shape, dice: random.Random) -> dict[str, Any]:
    """Its body, half the time so that no cache knows it: all of it is computed and handed over."""
    if dice.random() < 0.5:
        return shape.body
    return shape.body | {"cache_salt": f"{dice.getrandbits(64):x}"}
