"""The end that writes: a prefill rank's pool and sender, without the rest of a worker."""

from __future__ import annotations

import asyncio

from pdrt.cli.torture.engines import make_sender
from pdrt.cli.torture.messages import (
    Answer,
    Ask,
    Begin,
    CloseInstance,
    Command,
    Done,
    Finish,
    OpenInstance,
    Ready,
    Setup,
    Tally,
)
from pdrt.cli.torture.party import LAYOUT, bytes_of, make_pool, pattern
from pdrt.cli.torture.target import RANK
from pdrt.errors import EngineError
from pdrt.ids import Incarnation
from pdrt.protocol.room_writer import WriteOutcome
from pdrt.transfer.engine import ByteRange, WriteRequest
from pdrt.transfer.processes import this_process


class Writer:
    """Writes its pages over and over until it is told to end, or a write does not complete."""

    def __init__(self, setup: Setup, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        pool = make_pool(setup.pages, setup.device)
        bytes_of(pool, 0, setup.pages).copy_(pattern(setup.pages, setup.seed))
        self._sender = make_sender(setup.end, pool)
        self._counts = dict.fromkeys(WriteOutcome, 0)
        self._detail = ""
        self._plan: Begin | None = None
        """What is written now; None: nothing more is submitted."""
        self._next = 0
        self._outstanding = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def ready(self) -> Answer:
        return Ready(self._incarnation, this_process())

    async def handle(self, command: Command) -> Answer:
        match command:
            case OpenInstance(decode, generation, segment):
                await self._sender.open(decode, generation, [segment])
            case Begin():
                self._begin(command)
            case Ask():
                return self._tally()
            case Finish():
                self._plan = None
                await self._idle.wait()
                return self._tally()
            case CloseInstance(decode, generation):
                await self._sender.close_instance(decode, generation)
            case _:
                raise AssertionError(command)
        return Done()

    def _begin(self, plan: Begin) -> None:
        self._counts = dict.fromkeys(WriteOutcome, 0)
        self._detail, self._plan, self._next = "", plan, 0
        for _ in range(plan.outstanding):
            self._write()

    def _write(self) -> None:
        """One page."""
        plan = self._plan
        if plan is None:
            return
        page = self._next % plan.count
        self._next += 1
        size = LAYOUT.page_bytes
        piece = ByteRange(page * size, (plan.first + page) * size, size)
        request = WriteRequest(plan.room, plan.generation, RANK, (piece,))
        self._outstanding += 1
        self._idle.clear()
        try:
            self._sender.write(request, self._settled)
        except EngineError as error:
            self._settled(WriteOutcome.FAILED, str(error))

    def _settled(self, outcome: WriteOutcome, detail: str) -> None:
        self._outstanding -= 1
        self._counts[outcome] += 1
        if outcome is WriteOutcome.COMPLETED:
            self._write()
        else:  # as a room does, which closes then
            self._detail = self._detail or detail
            self._plan = None
        if not self._outstanding:
            self._idle.set()

    def _tally(self) -> Answer:
        completed, failed, unsettled = (self._counts[outcome] for outcome in WriteOutcome)
        return Tally(completed, failed, unsettled, self._detail)
