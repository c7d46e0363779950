"""Running whole sequences through an executor, as the workers do, and collecting their logits."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch

from pdrt.model.attention import ForwardContext
from pdrt.model.batch import Row
from pdrt.model.executor import Executor
from pdrt.model.rank_step import encode_step
from pdrt.sampling import Sampling

GREEDY = Sampling(max_tokens=64, temperature=0.0)


class PageSource:
    """Hands out pages in random order, so that no table is contiguous or ascending."""

    def __init__(self, executor: Executor, seed: int = 0) -> None:
        self._free = list(range(executor.pages))
        random.Random(seed).shuffle(self._free)

    def take(self, count: int) -> list[int]:
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "the test's pool is too small"
        return taken


class Run:
    """One sequence: its tokens so far, its pages, and the logits of every sampled token."""

    def __init__(
        self, executor: Executor, source: PageSource, prompt: Sequence[int], length_max: int
    ) -> None:
        self.tokens = list(prompt)
        self.prompt = len(prompt)
        self.computed = 0
        self.pages = source.take(executor.layout.pages_for(length_max))
        self.logits: list[torch.Tensor] = []

    def row(self, count: int) -> Row:
        """The row that feeds the next `count` tokens; it samples after the last known one."""
        fed = self.tokens[self.computed : self.computed + count]
        is_last = self.computed + len(fed) == len(self.tokens)
        return Row(
            token_ids=fed,
            start=self.computed,
            pages=self.pages,
            sampling=GREEDY if is_last else None,
            output_tokens=len(self.tokens) - self.prompt,
        )

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]


def run_step(executor: Executor, parts: Iterable[tuple[Run, int]]) -> None:
    """One step that feeds each sequence so many tokens; records tokens and logits."""
    parts = list(parts)
    rows = [sequence.row(count) for sequence, count in parts]
    result = executor.step_blocking(rows)
    # The same step once more (it writes the same KV into the same slots), for its logits.
    if executor.tell_ranks is not None:
        executor.tell_ranks(encode_step(rows, executor.layout.page_size))
    with torch.inference_mode():
        context = ForwardContext(executor.pool, rows, executor._backend)
        logits = executor._thread.submit(_forward, executor, context).result()
    for index, row_logits in zip(context.sampled, logits, strict=True):
        parts[index][0].logits.append(row_logits)
    for (sequence, _), row, token in zip(parts, rows, result.tokens, strict=True):
        sequence.computed = row.end
        assert (token is None) == (row.sampling is None)
        if token is not None:
            sequence.tokens.append(token)


def _forward(executor: Executor, context: ForwardContext) -> torch.Tensor:
    with torch.inference_mode():
        return executor.forward(context).float().clone()
