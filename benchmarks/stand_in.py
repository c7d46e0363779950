"""Stand-ins for the executor: what is measured is everything around the forward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import torch

from pdrt.kv.layout import KvLayout
from pdrt.kv.pool import KvPool
from pdrt.model.batch import Row, StepResult
from pdrt.model.identity import ModelIdentity

LAYOUT = KvLayout(page_size=16, kv_heads=1, layers=1, head_dim=2, dtype="float32")
FIRST_TOKEN, TOKENS = 300, 20_000
"""Ids that are drawn: ordinary text in any vocabulary of some size."""


class StandIn:
    """As `Executor`, with forwards that only take their time.

    Attributes:
        begun, ended: called with each step's number of rows.
    """

    def __init__(
        self, identity: ModelIdentity, pages: int, seconds: Callable[[int], float]
    ) -> None:
        """`seconds` that a step of so many rows takes; 0: one turn of the event loop."""
        self.identity = identity
        self.layout = LAYOUT
        self.pages = pages
        self.pool = KvPool(LAYOUT, pages, torch.device("cpu"))
        self.device = self.pool.tensor.device
        self.grammars = None
        self.begun: Callable[[int], None] = lambda rows: None
        self.ended: Callable[[int], None] = lambda rows: None
        self._seconds = seconds
        self._drawn_tokens = min(TOKENS, identity.vocab_size - FIRST_TOKEN)

    def step_age(self, now: float) -> float:
        return 0.0

    def step(self, rows: Sequence[Row]) -> asyncio.Future[StepResult]:
        self.begun(len(rows))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StepResult] = loop.create_future()
        drawn = [_drawn(row, self._drawn_tokens) for row in rows]
        result = StepResult(drawn, 0.0, [None] * len(rows), [()] * len(rows))
        seconds = self._seconds(len(rows))
        if seconds:
            loop.call_later(seconds, self._end, future, result)
        else:
            loop.call_soon(self._end, future, result)
        return future

    def _end(self, future: asyncio.Future[StepResult], result: StepResult) -> None:
        if not future.done():
            self.ended(len(result.tokens))
            future.set_result(result)


def _drawn(row: Row, tokens: int) -> int | None:
    """One of so many."""
    return None if row.sampling is None else FIRST_TOKEN + 31 * row.end % tokens


def instant_executor(pages: int) -> StandIn:
    """Its forwards take one turn of the event loop."""
    identity = ModelIdentity(
        name="instant",
        digest="0",
        max_model_len=1 << 20,
        vocab_size=1 << 16,
        eos_token_ids=(0,),
        architecture="Instant",
    )
    return StandIn(identity, pages, lambda rows: 0.0)
