"""Stand-ins for the executors of a worker of several ranks.

Each rank writes and reads its own heads of every position. Before it takes part in a step, a rank
reads back from its own pool what the leader has read from its own: what did not land there, landed
in parts or in the place of something else shows on the very rank, in the first step that needs it.

As with real collectives, no step ends on the leader before every rank takes part in it. A rank may
still be behind by then.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

import msgspec
import torch

from pdrt.kv.layout import KvLayout, rank_heads
from pdrt.kv.pool import KvPool
from pdrt.model.batch import Row, StepResult
from tests.prefill.executor import StandInExecutor, pattern_of, position_value

LAYOUT = KvLayout(page_size=4, kv_heads=6, layers=3, head_dim=2, dtype="float32")
ONE_HEAD = msgspec.structs.replace(LAYOUT, kv_heads=1)
"""All ranks but one of a worker have nothing to send."""


class StandInRow(msgspec.Struct, frozen=True, array_like=True):
    """One row of a step, and what its sequence holds before it."""

    token_ids: list[int]
    start: int
    pages: list[int]
    before: list[int]


class RankPart:
    """A rank's heads of every position."""

    def __init__(self, layout: KvLayout, rank: int, ranks: int, pool: KvPool) -> None:
        self._page_size = layout.page_size
        self._pool = pool
        held = rank_heads(layout.kv_heads, ranks)[rank]
        self._pattern = pattern_of(layout)[held.first : held.end]

    def _slot(self, pages: Sequence[int], place: int) -> torch.Tensor:
        page, slot = divmod(place, self._page_size)
        return self._pool.tensor[pages[page], :, :, :, slot, :]

    def compute(self, row: StandInRow) -> None:
        for place, value in enumerate(row.before):
            slot = self._slot(row.pages, place)
            assert torch.equal(slot, self._pattern + value), f"position {place} is wrong: {slot}"
        for place, token in enumerate(row.token_ids, row.start):
            self._slot(row.pages, place).copy_(self._pattern + position_value(token, place))


class LeaderStandIn(StandInExecutor):
    """Rank 0's: draws the tokens, from what its own heads hold."""

    def __init__(self, pages: int, layout: KvLayout, acks: Sequence[socket.socket]) -> None:
        """`acks`: one for each other rank, which sends a byte when it has computed its part."""
        ranks = 1 + len(acks)
        held = rank_heads(layout.kv_heads, ranks)[0]
        own = msgspec.structs.replace(layout, kv_heads=held.count)
        super().__init__(pages, own)
        self.layout = layout
        self.pattern = pattern_of(layout)[held.first : held.end]
        self.tell_ranks: Callable[[bytes], None] = lambda body: None
        self._acks = acks
        for end in acks:
            end.setblocking(False)

    async def step(self, rows: Sequence[Row]) -> StepResult:
        self.tell_ranks(msgspec.msgpack.encode([self._described(row) for row in rows]))
        result = await super().step(rows)
        for end in self._acks:
            await asyncio.get_running_loop().sock_recv(end, 1)
        return result

    def _described(self, row: Row) -> StandInRow:
        before = [self.read(row.pages, place) for place in range(row.start)]
        return StandInRow(list(row.token_ids), row.start, list(row.pages), before)

    def close(self) -> None:
        super().close()
        for end in self._acks:
            end.close()


class RankStandIn:
    """Another rank's."""

    def __init__(
        self, pages: int, layout: KvLayout, rank: int, ranks: int, ack: socket.socket
    ) -> None:
        held = rank_heads(layout.kv_heads, ranks)[rank]
        own = msgspec.structs.replace(layout, kv_heads=held.count)
        self.layout = layout
        self.pool = KvPool(own, pages, torch.device("cpu"))
        self.lag_seconds = 0.0
        """How far a prefill rank is behind its leader: what that says of the pages of a step comes
        before they are computed here."""
        self.on_step: Callable[[], None] = lambda: None
        self._part = RankPart(layout, rank, ranks, self.pool)
        self._decoder = msgspec.msgpack.Decoder(list[StandInRow])
        self._ack = ack

    async def step(self, body: bytes) -> None:
        self.on_step()
        if self.lag_seconds:
            self._ack.send(b".")
            await asyncio.sleep(self.lag_seconds)
        for row in self._decoder.decode(body):
            self._part.compute(row)
        if not self.lag_seconds:
            self._ack.send(b".")
