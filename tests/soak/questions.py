"""What is asked in a soak: prompts of every length that matters, with the answers that the model
gives in one piece."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.chaos.shapes import COMPLETIONS, MARGIN, Answer, Shape
from tests.e2e.reference import Reference, words

PAGE_TOKENS = 16
CHUNK_TOKENS = 40
"""Chunks end in the middle of a page, and at the end of one."""
OUTPUT_TOKENS = 14
LONG_TOKENS = 100
BASES = 3
"""Texts that prompts are beginnings of: what one leaves in the caches, others find."""


def lengths() -> list[int]:
    """1 … 2 · page + 1, and each side of the ends of pages and chunks."""
    pages = range(3 * PAGE_TOKENS, 9 * PAGE_TOKENS, PAGE_TOKENS)
    chunks = range(CHUNK_TOKENS, 4 * CHUNK_TOKENS + 1, CHUNK_TOKENS)
    around = {end + off for end in (*pages, *chunks) for off in (-1, 0, 1)}
    return sorted({*range(1, 2 * PAGE_TOKENS + 2), *around})


class Questions:
    """Shapes for `tests.chaos.load.Load`. A seed determines all of them."""

    def __init__(self, reference: Reference, seed: int) -> None:
        self.expected: dict[str, Answer] = {}
        """By name of the shape."""
        self._reference = reference
        self._dice = random.Random(f"questions {seed}")
        longest = max(lengths()) + BASES
        self._bases = [
            words(reference, longest, seed=self._dice.getrandbits(32)) for _ in range(BASES)
        ]
        self.all = [
            shape
            for index, length in enumerate(lengths())
            for shape in self._of_length(length, self._bases[index % BASES])
        ]
        prompt, tokens = self._clear(9, self._bases[0], LONG_TOKENS)
        self.long = self._shape(prompt, tokens, LONG_TOKENS)

    def _of_length(self, length: int, base: list[int]) -> Iterator[Shape]:
        prompt, tokens = self._clear(length, base, OUTPUT_TOKENS)
        for max_tokens in (0, 1, 2, OUTPUT_TOKENS):
            yield self._shape(prompt, tokens, max_tokens)
        some = self._dice.randrange(3, OUTPUT_TOKENS)
        yield self._shape(prompt, tokens, some, choices=self._dice.choice((2, 3)))

    def _clear(self, length: int, base: list[int], count: int) -> tuple[list[int], list[int]]:
        """A prompt that is `base` but for its last token, whose greedy answer nobody can doubt;
        and that answer."""
        for last in self._dice.sample(base, len(base)):
            prompt = [*base[: length - 1], last]
            tokens, margins, _ = self._reference.greedy(prompt, count, ignore_eos=True)
            if min(margins) > MARGIN:
                return prompt, tokens
        raise AssertionError(f"no prompt of {length} tokens has a clear answer")

    def _shape(
        self, prompt: list[int], tokens: list[int], max_tokens: int, choices: int = 1
    ) -> Shape:
        name = f"{len(prompt)} tokens, {max_tokens} wanted, {choices} choices"
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        text = self._reference.decode(tokens[:max_tokens])
        self.expected[name] = Answer(
            (text,) * choices, ("length",) * choices, len(prompt), choices * max_tokens
        )
        return Shape(name, COMPLETIONS, body | ({"n": choices} if choices > 1 else {}))
