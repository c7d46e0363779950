"""The model in one process, over one pool: what the two workers' answers are compared with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pdrt.config import DeviceConfig, ModelConfig
from pdrt.model.batch import Row
from pdrt.model.executor import Executor
from pdrt.sampling import Sampling

MARGIN = 1e-3
"""Two best log probabilities closer than this may change places: the sums have another order where
a step has other rows."""
GREEDY = Sampling(max_tokens=1, temperature=0.0)
CHUNK = 512
"""Tokens of a prompt at once, as the workers have it."""


class Reference:
    """An executor on the GPU."""

    def __init__(self, model: Path, dtype: Literal["float32", "bfloat16"], pool_bytes: int) -> None:
        settings = ModelConfig(model=str(model), dtype=dtype, kv_cache_memory_bytes=pool_bytes)
        self.executor = Executor.load(settings, DeviceConfig(gpus="0"), lambda text: None)
        self._vocabulary = self.executor.identity.vocab_size

    def prompt(self, length: int, seed: int) -> list[int]:
        dice = random.Random(seed)
        return [dice.randrange(3, self._vocabulary) for _ in range(length)]

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """As prefill and decode do it: the prompt in chunks, then token by token."""
        tokens, pages = list(prompt), range(self.executor.pages)
        for start in range(0, len(prompt), CHUNK):
            chunk = prompt[start : start + CHUNK]
            is_last = start + len(chunk) == len(prompt)
            row = Row(chunk, start, pages, GREEDY if is_last else None)
            found = self.executor.step_blocking([row]).tokens[0]
        for start in range(len(prompt), len(prompt) + count):
            assert found is not None
            tokens.append(found)
            row = Row([found], start, pages, GREEDY)
            found = self.executor.step_blocking([row]).tokens[0]
        return tokens[len(prompt) :]

    def worst(self, prompt: Sequence[int], output: Sequence[int]) -> float:
        """By how much, at most, a token of `output` is less likely than the likeliest one, all
        tokens before it being given."""
        fed, asked = [*prompt, *output][:-1], [*prompt, *output][1:]
        first = len(prompt) - 1
        # Scores of a prompt, of which only the output's are looked at.
        row = Row(fed, 0, range(self.executor.pages), None, scored=asked, scored_top=1)
        (scores,) = self.executor.step_blocking([row]).scores
        return max(s.top[0][1] - s.logprob for s in scores[first:])

    def close(self) -> None:
        self.executor.close()
