"""One fault in the middle of a write, and what the fence is worth then.

The victim writes its lease over and over; a neighbour, of another prefill worker, does the same
beside it. After the fault the target takes the victim's pages back, behind the fence or, as the
counter-example, after a time, and gives them to a new owner. Then the fault is undone. Whatever
lands in the pages from then on is corruption.
"""

from __future__ import annotations

import asyncio
import time
from enum import Enum

import msgspec

from pdrt.cli.torture.engines import End
from pdrt.cli.torture.messages import (
    Ask,
    Begin,
    Bytes,
    CloseInstance,
    Compare,
    Done,
    Fence,
    Fenced,
    Finish,
    Look,
    Opened,
    OpenInstance,
    OpenSegment,
    Ready,
    Reuse,
    Setup,
    Tally,
)
from pdrt.cli.torture.places import Places
from pdrt.cli.torture.remote import Party
from pdrt.config import MooncakeConfig
from pdrt.errors import PdrtError
from pdrt.ids import RoomId

LEASE_PAGES, NEIGHBOUR_PAGES = 24, 8
"""Of 2 MiB."""
OUTSTANDING = 12
"""Writes, of the victim and of its neighbour: at any moment some of them are under way."""
VICTIM, NEIGHBOUR = "victim", "neighbour"
SEEDS = {VICTIM: 1, NEIGHBOUR: 2}
FIRST_PAGE = {VICTIM: 0, NEIGHBOUR: LEASE_PAGES}
PAGES = {VICTIM: LEASE_PAGES, NEIGHBOUR: NEIGHBOUR_PAGES}
ROUNDS = 2
"""How often a lease has been written before the fault: every connection is there then."""
HOLD_SECONDS = 0.5
"""What the fault lasts before the fence, and again after it."""
WATCH_SECONDS, WATCH_FACTOR = 1.0, 1.5
"""For late bytes, after the fault is undone. TCP waits twice as long each time: where packets were
dropped, its next attempt comes within about as long as they were."""
POLL_SECONDS = 0.02
SECONDS_MAX = 60.0
"""For what takes a moment."""


class Fault(Enum):
    STOP = "writer stopped in mid-write"
    KILL = "writer killed in mid-write, target stopped"
    DROP = "packets dropped in mid-write"
    DROP_AND_KILL = "packets dropped, then writer killed"

    @property
    def is_of_network(self) -> bool:
        return self in (Fault.DROP, Fault.DROP_AND_KILL)

    @property
    def kills(self) -> bool:
        return self in (Fault.KILL, Fault.DROP_AND_KILL)


class Outcome(msgspec.Struct, frozen=True):
    """What one trial has shown."""

    fence_seconds: float | None
    """None: there was a timeout instead."""
    late_bytes: int
    """That landed in the pages after their next owner had them."""
    neighbour: Tally
    neighbour_wrong_bytes: int
    back: Tally
    """Of a whole lease, written to the same pages in the next generation."""
    back_wrong_bytes: int


class Fabric(msgspec.Struct, frozen=True):
    """What moves the bytes, from and to which memory."""

    engine: str
    device: str = "cpu"
    mooncake: MooncakeConfig = MooncakeConfig()


class Session:
    """A target, a victim and a neighbour through any number of trials. An async context."""

    def __init__(self, fabric: Fabric, places: Places) -> None:
        self._fabric = fabric
        self._places = places
        self._parties: dict[str, Party] = {}
        self._facts: dict[str, Ready] = {}
        self._generation = 0
        """Of the victim's segment."""
        self._rooms: dict[str, RoomId] = {}
        """The one that each writer has now."""
        self._rooms_opened = 0

    async def __aenter__(self) -> Session:
        """Raises PdrtError where the engine does not run here."""
        try:
            names = ("target", VICTIM, NEIGHBOUR)
            await asyncio.gather(*(self._start(name) for name in names))
            await self._open(NEIGHBOUR, 1)
            await self._open_next()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(party.close() for party in self._parties.values()))

    async def fenced(self, fault: Fault) -> Outcome:
        """The pages are taken back behind the fence."""
        await self._begin()
        await self._strike(fault)
        await asyncio.sleep(HOLD_SECONDS)
        self._target.tell(self._fence)
        self._target.tell(Reuse(0, LEASE_PAGES))
        if fault is Fault.KILL:
            await self._target.go_on()
        seconds = (await self._target.answer(Fenced)).seconds
        await self._target.answer(Done)
        await asyncio.sleep(HOLD_SECONDS)
        await self._undo(fault)
        late_bytes = await self._late_bytes(fault, 2 * HOLD_SECONDS)
        return await self._end(fault, seconds, late_bytes)

    async def timed_out(self, fault: Fault, timeout_seconds: float) -> Outcome:
        """The pages are taken back because the victim has been silent for so long."""
        await self._begin()
        await self._strike(fault)
        await asyncio.sleep(timeout_seconds)
        self._target.tell(Reuse(0, LEASE_PAGES))
        if fault is Fault.KILL:
            await self._target.go_on()
        await self._target.answer(Done)
        await self._undo(fault)
        late_bytes = await self._late_bytes(fault, timeout_seconds)
        await self._target.ask(self._fence, Fenced)
        return await self._end(fault, None, late_bytes)

    # Steps of a trial

    async def _begin(self) -> None:
        """Both write, and are in the middle of it."""
        for name in (VICTIM, NEIGHBOUR):
            await self._write(name, OUTSTANDING)
        for name in (VICTIM, NEIGHBOUR):
            wanted = ROUNDS * PAGES[name]
            tally = await self._completed(name, wanted)
            if tally.completed < wanted:
                raise PdrtError(f"{name} cannot write, without any fault: {tally.detail}")

    async def _strike(self, fault: Fault) -> None:
        if fault is Fault.STOP:
            await self._parties[VICTIM].stop()
        if fault is Fault.KILL:
            await self._target.stop()
        if fault.is_of_network:
            self._places.cut(VICTIM)
        if fault.kills:
            await self._parties[VICTIM].kill()

    async def _undo(self, fault: Fault) -> None:
        if fault is Fault.STOP:
            await self._parties[VICTIM].go_on()
        if fault.is_of_network:
            self._places.mend(VICTIM)

    async def _late_bytes(self, fault: Fault, held_seconds: float) -> int:
        """In the victim's former pages, once everything has had its time to land."""
        longer = WATCH_FACTOR * held_seconds if fault.is_of_network else 0.0
        await asyncio.sleep(WATCH_SECONDS + longer)
        return (await self._target.ask(Look(0, LEASE_PAGES), Bytes)).count

    async def _end(self, fault: Fault, fence_seconds: float | None, late_bytes: int) -> Outcome:
        """The neighbour's account, and the pages in use again."""
        neighbour = await self._parties[NEIGHBOUR].ask(Finish(), Tally)
        neighbour_wrong_bytes = await self._wrong_bytes(NEIGHBOUR)
        await self._leave(fault)
        await self._open_next()
        await self._write(VICTIM, LEASE_PAGES)
        back = await self._completed(VICTIM, LEASE_PAGES)
        await self._parties[VICTIM].ask(Finish(), Tally)
        back_wrong_bytes = await self._wrong_bytes(VICTIM)
        return Outcome(
            fence_seconds, late_bytes, neighbour, neighbour_wrong_bytes, back, back_wrong_bytes
        )

    async def _leave(self, fault: Fault) -> None:
        """The victim lets go of its old generation; one that was killed has a successor."""
        if fault.kills or self._fabric.engine == "local":  # whose fence is its death
            await self._parties[VICTIM].close()
            await self._start(VICTIM)
            return
        victim = self._parties[VICTIM]
        await victim.ask(Finish(), Tally)
        decode = self._facts["target"].incarnation
        await victim.ask(CloseInstance(decode, self._generation), Done)

    # The parties

    @property
    def _target(self) -> Party:
        return self._parties["target"]

    @property
    def _fence(self) -> Fence:
        return Fence(VICTIM, self._generation)

    async def _start(self, name: str) -> None:
        role = "target" if name == "target" else "writer"
        party = await Party.start(name, role, self._places.command(name))
        self._parties[name] = party
        pages = PAGES.get(name, sum(PAGES.values()))
        end = End(self._fabric.engine, self._places.address(name), self._fabric.mooncake)
        setup = Setup(end, self._fabric.device, pages, SEEDS.get(name, 0))
        self._facts[name] = await party.ask(setup, Ready)

    async def _open_next(self) -> None:
        self._generation += 1
        await self._open(VICTIM, self._generation)

    async def _open(self, name: str, generation: int) -> None:
        writer, decode = self._facts[name].process, self._facts["target"].incarnation
        self._rooms_opened += 1
        room = self._rooms[name] = RoomId(decode, self._rooms_opened)
        command = OpenSegment(name, generation, writer, room, FIRST_PAGE[name], PAGES[name])
        segment = (await self._target.ask(command, Opened)).segment
        await self._parties[name].ask(OpenInstance(decode, generation, segment), Done)

    async def _write(self, name: str, outstanding: int) -> None:
        generation = self._generation if name == VICTIM else 1
        begin = Begin(self._rooms[name], generation, FIRST_PAGE[name], PAGES[name], outstanding)
        await self._parties[name].ask(begin, Done)

    async def _completed(self, name: str, count: int) -> Tally:
        """Once so many writes have, or one has ended otherwise."""
        party, deadline = self._parties[name], time.monotonic() + SECONDS_MAX
        while (tally := await party.ask(Ask(), Tally)).completed < count:
            if tally.failed or tally.unsettled:
                break
            if time.monotonic() > deadline:
                raise PdrtError(f"{name} wrote {tally.completed} pages in {SECONDS_MAX:.0f} s")
            await asyncio.sleep(POLL_SECONDS)
        return tally

    async def _wrong_bytes(self, name: str) -> int:
        compare = Compare(FIRST_PAGE[name], PAGES[name], SEEDS[name])
        return (await self._target.ask(compare, Bytes)).count
