"""A stand-in for the model's executor whose tokens are computed from what the pool holds.

Each position's KV is one number that depends on its token and its place, spread over the whole
slot in a way that differs from element to element; the next token is a digest of all of them,
read back from the pool. So a page that did not land, landed in parts, or was overwritten shows
as a broken slot or as a wrong token.
"""

from __future__ import annotations

import asyncio
import functools
import zlib
from collections.abc import Callable, Sequence

import torch

from pdrt.errors import RequestRefused
from pdrt.kv.layout import KvLayout
from pdrt.kv.pool import KvPool
from pdrt.model.batch import Row, StepResult, validate_rows
from pdrt.model.identity import ModelIdentity
from pdrt.sampling import Grammar, TokenLogprobs

LAYOUT = KvLayout(page_size=4, kv_heads=2, layers=3, head_dim=2, dtype="float32")
VOCABULARY = 1000
EOS = 0
"""Never comes out of `next_token` by itself."""


def identity(name: str = "stand-in", max_model_len: int = 96) -> ModelIdentity:
    return ModelIdentity(
        name=name,
        digest="d1",
        max_model_len=max_model_len,
        vocab_size=VOCABULARY,
        eos_token_ids=(EOS,),
        architecture="StandIn",
    )


def position_value(token: int, position: int) -> int:
    """Exact in float32, and never 0: an untouched slot is told from a written one."""
    return 1 + zlib.crc32(f"{token}/{position}".encode()) % 100_000


def next_token(tokens: Sequence[int]) -> int:
    return _digest([position_value(token, place) for place, token in enumerate(tokens)])


def _digest(values: Sequence[int]) -> int:
    return 1 + zlib.crc32(",".join(map(str, values)).encode()) % (VOCABULARY - 1)


def logprobs_of(tokens: Sequence[int], place: int, top: int) -> TokenLogprobs:
    """What the stand-in says of the token at `place`: a number of all that comes before it."""
    return _logprobs(next_token(tokens[:place]), tokens[place], top)


def _logprobs(digest: int, token: int, top: int) -> TokenLogprobs:
    return TokenLogprobs(-float(digest), token + 1, tuple((t, -float(t)) for t in range(top)))


def output_of(prompt: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that follow `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@functools.cache
def pattern_of(layout: KvLayout) -> torch.Tensor:
    """What each element of a slot adds to its position's number."""
    shape = (layout.kv_heads, layout.layers, 2, layout.head_dim)
    count = shape[0] * shape[1] * shape[2] * shape[3]
    return torch.arange(count, dtype=torch.float32).view(shape) * 4


class Gate:
    """Open at first. While it is closed only so many pass as are let through."""

    def __init__(self) -> None:
        self._is_open = asyncio.Event()
        self._passes = asyncio.Semaphore(0)
        self.set()

    def set(self) -> None:
        self._is_open.set()

    def clear(self) -> None:
        self._is_open.clear()

    @property
    def is_closed(self) -> bool:
        return not self._is_open.is_set()

    def step(self) -> None:
        """Let one through."""
        self._passes.release()

    async def wait(self) -> None:
        waits = [asyncio.ensure_future(x) for x in (self._is_open.wait(), self._passes.acquire())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


class StandInMatcher:
    """A grammar that permits everything, and remembers what it was shown. The grammar `lost` can be
    followed no further from its first token on."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.output: list[int] = []
        self.failure: str | None = None

    def advance(self, output_ids: Sequence[int]) -> None:
        assert list(output_ids[: len(self.output)]) == self.output
        self.output = list(output_ids)
        if self.grammar.text == "lost":
            self.failure = "the process is lost"

    def fill(self, bitmask: object, row: int) -> None:
        raise AssertionError("the stand-in has no logits")


class StandInGrammars:
    """Refuses the grammar `no`."""

    def __init__(self) -> None:
        self.gate = Gate()

    async def matcher(self, grammar: Grammar, is_wanted: Callable[[], bool]) -> StandInMatcher:
        await self.gate.wait()
        if grammar.text == "no":
            raise RequestRefused("such a grammar has no words", "grammar")
        return StandInMatcher(grammar)


class StandInExecutor:
    """As `pdrt.model.executor.Executor`, one step at a time."""

    def __init__(
        self, pages: int, layout: KvLayout = LAYOUT, identity_: ModelIdentity | None = None
    ) -> None:
        self.identity = identity_ or identity()
        self.layout = layout
        self.pages = pages
        self.pool = KvPool(layout, pages, torch.device("cpu"))
        self.pattern = pattern_of(layout)
        self.grammars = StandInGrammars()
        self.gate = Gate()
        """Where each step waits, in its middle."""
        self.steps: list[list[Row]] = []
        self.failures = 0
        """So many of the next steps raise."""
        self.page_owner: Callable[[int], object] = lambda page: None
        """Of the worker's page table: no page changes hands while a step uses it."""
        self.on_step: Callable[[int], None] = lambda rows: None
        self.age = 0.0
        """Of a running step, as `step_age` tells it."""
        self._is_running = False

    @property
    def is_running(self) -> bool:
        return self._is_running

    def step_age(self, now: float) -> float:
        return self.age if self._is_running else 0.0

    async def step(self, rows: Sequence[Row]) -> StepResult:
        assert not self._is_running, "one step at a time"
        validate_rows(rows, self.layout, self.pages, self.identity.max_model_len)
        self._is_running = True
        self.steps.append(list(rows))
        self.on_step(len(rows))
        touched = {page for row in rows for page in row.pages}
        owners = {page: self.page_owner(page) for page in touched}
        try:
            await asyncio.sleep(0)
            if self.gate.is_closed:
                await self.gate.wait()
            assert owners == {page: self.page_owner(page) for page in touched}
            if self.failures:
                self.failures -= 1
                raise RuntimeError("the forward failed on purpose")
            for row in rows:
                self._write(row)
            tokens = [self._sample(row) for row in rows]
            logprobs = [
                self._sampled_logprobs(row, token) for row, token in zip(rows, tokens, strict=True)
            ]
            return StepResult(tokens, 0.0, logprobs, [self._scores(row) for row in rows])
        finally:
            self._is_running = False

    def _slot(self, pages: Sequence[int], position: int) -> torch.Tensor:
        page, slot = divmod(position, self.layout.page_size)
        return self.pool.tensor[pages[page], :, :, :, slot, :]

    def _write(self, row: Row) -> None:
        for place, token in enumerate(row.token_ids, start=row.start):
            value = position_value(token, place)
            self._slot(row.pages, place).copy_(self.pattern + value)

    def _digest_before(self, row: Row, place: int) -> int:
        return _digest([self.read(row.pages, earlier) for earlier in range(place)])

    def _sample(self, row: Row) -> int | None:
        if row.sampling is None:
            return None
        assert (row.matcher is not None) == (row.sampling.grammar is not None)
        if row.sampling.needs_history:
            assert len(row.history) == row.end
            for place, token in enumerate(row.history):
                assert self.read(row.pages, place) == position_value(token, place)
        if row.matcher is not None:
            row.matcher.advance(row.history[row.end - row.output_tokens :])
        return self._digest_before(row, row.end)

    def _sampled_logprobs(self, row: Row, token: int | None) -> TokenLogprobs | None:
        if token is None or row.sampling is None or row.sampling.logprobs is None:
            return None
        return _logprobs(token, token, row.sampling.logprobs)

    def _scores(self, row: Row) -> tuple[TokenLogprobs, ...]:
        assert len(row.scored) <= len(row.token_ids)
        return tuple(
            _logprobs(self._digest_before(row, place), token, row.scored_top)
            for place, token in enumerate(row.scored, start=row.start + 1)
        )

    def read(self, pages: Sequence[int], position: int) -> int:
        """The number that a position's whole slot spells."""
        slot = self._slot(pages, position)
        value = int(slot.flatten()[0])
        assert value, f"position {position} was never written"
        assert torch.equal(slot, self.pattern + value), f"position {position} is torn"
        return value

    def close(self) -> None:
        self.pool.close()
