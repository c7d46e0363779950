"""All ranks of one worker, as its leader sees them: rank 0 is served in the leader's own process,
the others behind channels, all by the same handler. None is replaced alone: whatever befalls one
ends the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Generic, TypeVar

import msgspec

from pdrt.transfer.rank_channel import RankChannel, encode
from pdrt.transfer.rank_check import Believed, RankCheck, Verdict
from pdrt.transfer.rank_children import RankChild
from pdrt.transfer.rank_messages import (
    Alive,
    Check,
    Checked,
    RankReport,
    Step,
    StepFailed,
)
from pdrt.transfer.worker_loop import ExitCode, WorkerLoop

ToRank = TypeVar("ToRank", bound=msgspec.Struct)
FromRank = TypeVar("FromRank")
EngineBytes = Mapping[int, Mapping[str, int]]
"""KV bytes by rank, and by the engine that carried them."""

DEATH_SECONDS_MAX = 1.0
"""A process that dies closes its channel first, and fails the collectives that others are in: so
long its death may take to be seen. That says more than what follows from it."""
CHECK_SECONDS_MAX = 0.5
"""For the ranks' answers; a gateway that asks waits a second for its workers'."""
SILENT_HEARTBEATS = 3
"""A rank that has missed so many is shown as silent; `--silence-seconds` ends the worker."""


class RankState(Enum):
    """What is shown of a rank."""

    STARTING = "starting"
    """It has not been heard yet."""
    SERVING = "serving"
    SILENT = "silent"


class RankGroup(Generic[ToRank, FromRank]):
    """Tells every rank, in order, and hears from every rank."""

    def __init__(self, children: Sequence[RankChild], answers: Any, loop: WorkerLoop) -> None:
        """`answers`: the union of what a rank of this role says."""
        self.handle: Callable[[ToRank], None]
        """Serves rank 0."""
        self.on_answer: Callable[[int, FromRank], None]
        """A rank has said something."""
        self.on_alive: Callable[[int, float], None] = lambda rank, now: None
        """A sign of life of another rank than 0."""
        self.report: Callable[[], RankReport] = RankReport
        """That of rank 0."""
        self.believed: Believed = lambda rank: frozenset()
        self._children = children
        self._loop = loop
        self._checks: dict[int, RankCheck] = {}
        self._serial = 0
        self._heard_at = {child.rank: time.monotonic() for child in children}
        # The newest of each other rank that has been heard.
        self._reports: dict[int, RankReport] = {}
        self._channels = {child.rank: self._channel(child, answers) for child in children}
        for child in children:
            asyncio.get_running_loop().add_reader(child.fd, self._died, child)

    def _channel(self, child: RankChild, answers: Any) -> RankChannel[Any]:
        return RankChannel(
            child.end,
            answers | Alive | StepFailed | Checked,
            lambda message: self._receive(child.rank, message),
            lambda why: self._fails(f"rank {child.rank} cannot be heard: {why}"),
        )

    @property
    def has_others(self) -> bool:
        """Ranks beside the leader's own."""
        return bool(self._channels)

    # Said

    def tell(self, message: ToRank) -> None:
        """Every rank, after everything that it was told before."""
        self.handle(message)
        self._send(message)

    def step(self, body: bytes) -> None:
        """Have the other ranks take part in a forward that the leader is about to begin."""
        self._send(Step(body))

    def _send(self, message: msgspec.Struct) -> None:
        if self._channels:
            frame = encode(message)
            for channel in self._channels.values():
                channel.send(frame)

    # Heard

    def answer(self, message: FromRank) -> None:
        """What rank 0 says."""
        self.on_answer(0, message)

    def _receive(self, rank: int, message: Any) -> None:
        if self._loop.is_ending:
            return
        now = self._heard_at[rank] = time.monotonic()
        self.on_alive(rank, now)
        match message:
            case Alive(report):
                self._reports[rank] = report
            case StepFailed(why):
                self._fails(f"a forward failed on rank {rank}: {why}")
            case Checked(serial):
                if check := self._checks.get(serial):
                    check.answered(rank, message)
            case _:
                self.on_answer(rank, message)

    def drain(self) -> None:
        """Read everything that has arrived."""
        for channel in self._channels.values():
            channel.drain()

    def reports(self) -> dict[int, RankReport]:
        """The newest of every rank that has been heard."""
        return {0: self.report(), **self._reports}

    def states(self, now: float, heartbeat_seconds: float) -> dict[int, RankState]:
        """Of every rank. `heartbeat_seconds`: between two signs of life."""
        states = {0: RankState.SERVING}
        for rank, heard_at in self._heard_at.items():
            states[rank] = RankState.SERVING
            if now - heard_at > SILENT_HEARTBEATS * heartbeat_seconds:
                states[rank] = RankState.SILENT
            elif rank not in self._reports:
                states[rank] = RankState.STARTING
        return states

    def seen(
        self, now: float, heartbeat_seconds: float, engine_bytes: EngineBytes
    ) -> list[dict[str, Any]]:
        """For `/status`: every rank's process, and what it says of itself."""
        heard = {0: now, **self._heard_at}
        pids = {0: os.getpid(), **{child.rank: child.pid for child in self._children}}
        states, reports = self.states(now, heartbeat_seconds), self.reports()
        return [
            {
                "rank": rank,
                "pid": pids[rank],
                "state": states[rank].value,
                "heard_seconds": round(now - heard[rank], 3),
                "engine_bytes": dict(engine_bytes.get(rank, {})),
                **msgspec.structs.asdict(reports.get(rank, RankReport())),
            }
            for rank in sorted(pids)
        ]

    async def check(self) -> Verdict:
        """Have the other ranks check all their invariants, and compare what they hold."""
        self._serial += 1
        serial, check = self._serial, RankCheck(list(self._channels), self.believed)
        self._checks[serial] = check
        self._send(Check(serial))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CHECK_SECONDS_MAX):
                await check.is_over.wait()
        del self._checks[serial]
        return check.verdict()

    async def check_others(self) -> None:
        """Raise AssertionError where another rank finds an invariant broken."""
        broken = (await self.check()).broken
        assert not broken, "; ".join(broken)

    # The end

    def _died(self, child: RankChild) -> None:
        asyncio.get_running_loop().remove_reader(child.fd)
        fate = child.fate()
        assert fate is not None, child.rank
        self._end(fate)

    def _fails(self, why: str) -> None:
        """It may be for the death of a rank."""
        asyncio.get_running_loop().call_later(DEATH_SECONDS_MAX, self._end, why)

    async def forward_failed(self, why: str) -> None:
        """The leader's own forward has raised, so that the ranks are out of step. Ends the
        worker."""
        self._fails(f"a forward failed on rank 0: {why}")
        await asyncio.sleep(2 * DEATH_SECONDS_MAX)

    def _end(self, why: str) -> None:
        self._loop.end(ExitCode.CANNOT_GO_ON, why)

    def close(self) -> None:
        """At exit: no rank outlives its leader."""
        for child in self._children:
            asyncio.get_running_loop().remove_reader(child.fd)
            child.kill()
        for channel in self._channels.values():
            channel.close()
        for child in self._children:
            child.close()
