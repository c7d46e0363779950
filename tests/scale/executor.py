"""A stand-in for the model's executor that takes its time and little else, and whose tokens still
tell whether a sequence reads its own pages.

The KV of a position is one number, the checksum of all tokens up to it; the next token is made of
the last one. So a sequence that decodes on what did not land, or on pages of somebody else, says
something else than it should.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

import numpy as np
import torch

from pdrt.kv.layout import KvLayout
from pdrt.kv.pool import KvPool
from pdrt.model.batch import Row, StepResult, validate_rows
from pdrt.model.identity import ModelIdentity

LAYOUT = KvLayout(page_size=16, kv_heads=1, layers=1, head_dim=2, dtype="float32")
VOCABULARY = 50_000
DIGEST = "d1"
IDENTITY = ModelIdentity(
    name="timed",
    digest=DIGEST,
    max_model_len=1 << 14,
    vocab_size=VOCABULARY,
    eos_token_ids=(0,),
    architecture="Timed",
)


def output_of(prompt: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that follow `prompt`."""
    checksum, output = 0, list[int]()
    for token in prompt:
        checksum = _after(checksum, token)
    for _ in range(count):
        output.append(_token(checksum))
        checksum = _after(checksum, output[-1])
    return output


def _after(checksum: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), checksum)


def _token(checksum: int) -> int:
    """Never one that ends the output."""
    return 1 + checksum % (VOCABULARY - 1)


class TimedExecutor:
    """As `pdrt.model.executor.Executor`, on the event loop."""

    def __init__(self, pages: int, step_seconds: float) -> None:
        self.identity = IDENTITY
        self.layout = LAYOUT
        self.pages = pages
        self.pool = KvPool(LAYOUT, pages, torch.device("cpu"))
        self.device = self.pool.tensor.device
        self.grammars = None
        self.gate = asyncio.Event()
        """Where each step waits, in its middle."""
        self.gate.set()
        self._step_seconds = step_seconds
        # [page, slot]: the first number of each position.
        first = self.pool.tensor[:, 0, 0, 0, :, 0].view(torch.int32)
        self._checksums = first.numpy().view(np.uint32)

    def step_age(self, now: float) -> float:
        return 0.0

    async def step(self, rows: Sequence[Row]) -> StepResult:
        validate_rows(rows, self.layout, self.pages, self.identity.max_model_len)
        await self.gate.wait()
        await asyncio.sleep(self._step_seconds)
        tokens = [self._compute(row) for row in rows]
        return StepResult(tokens, self._step_seconds, [None] * len(rows), [()] * len(rows))

    def _compute(self, row: Row) -> int | None:
        checksum = self._read(row.pages, row.start - 1) if row.start else 0
        for place, token in enumerate(row.token_ids, row.start):
            checksum = _after(checksum, token)
            page, slot = divmod(place, LAYOUT.page_size)
            self._checksums[row.pages[page], slot] = checksum
        return None if row.sampling is None else _token(checksum)

    def _read(self, pages: Sequence[int], place: int) -> int:
        page, slot = divmod(place, LAYOUT.page_size)
        return int(self._checksums[pages[page], slot])

    def close(self) -> None:
        self.pool.close()
