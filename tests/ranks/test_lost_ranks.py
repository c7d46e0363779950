"""A rank that dies or hangs takes its worker with it, which says which and why; and nobody's pages
are free before every process of the writer is dead."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from pdrt.config import WorkerConfig
from pdrt.kv.pages import OwnerKind
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.sampling import Sampling
from pdrt.transfer.processes import ProcessHandle
from pdrt.transfer.worker_loop import ExitCode
from tests.decode.deployment import (
    HANG_SECONDS,
    PROTOCOL,
    Deployment,
    GatewayPeer,
    Stream,
    prompt_of,
    until,
)
from tests.prefill.executor import output_of
from tests.ranks import process
from tests.ranks.group import Ranks
from tests.ranks.process import PAGES, RankTask
from tests.ranks.stand_in import LAYOUT, LeaderStandIn
from tests.transfer.forked import Forked

pytestmark = pytest.mark.e2e

ATTENTIVE = msgspec.structs.replace(
    PROTOCOL,
    silence_seconds=0.5,
    tick_late_seconds=0.3,
    kill_lost_after_seconds=0.5,
    quarantine_after_seconds=0.2,
)


def is_dead(pid: int) -> bool:
    """Gone, or not reaped yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


# The worker itself: its leader in this process


class Lone:
    """One worker, with ranks that may be lost."""

    def __init__(self, role: str) -> None:
        self.deployment = Deployment(GatewayPeer())
        self.config: WorkerConfig = self.deployment.config(ATTENTIVE)
        self.ranks = Ranks(role, self.config, LAYOUT, 3)
        self._role = role
        self.worker: Any

    async def start(self) -> None:
        executor = await self.ranks.start()
        is_prefill = self._role == "prefill"
        add: Any = self.deployment.add_prefill if is_prefill else self.deployment.add_decode
        self.worker = add(executor, self.config, self.ranks.children)
        heard = self.worker.ranks.on_alive
        alive: set[int] = set()
        self.worker.ranks.on_alive = lambda rank, now: (alive.add(rank), heard(rank, now))
        await until(lambda: alive == {1, 2}, "both ranks")

    async def ends(self, caplog: pytest.LogCaptureFixture) -> str:
        """Why."""
        assert await self.deployment.exit_code(self.worker) is ExitCode.CANNOT_GO_ON
        ends = [r for r in caplog.records if r.getMessage() == "worker ends"]
        assert ends[0].levelno == logging.ERROR
        return str(vars(ends[0])["why"])


@pytest.fixture(params=["prefill", "decode"])
async def lone(request: pytest.FixtureRequest) -> AsyncIterator[Lone]:
    lone = Lone(request.param)
    try:
        await lone.start()
        yield lone
        for forked in lone.ranks.forked:
            await asyncio.to_thread(forked.process.join, HANG_SECONDS)
            assert not forked.process.is_alive(), "a rank has outlived its leader"
    finally:
        lone.ranks.end()
        lone.deployment.gateway.channel.close()


async def test_a_rank_that_is_killed(lone: Lone, caplog: pytest.LogCaptureFixture) -> None:
    pid = lone.ranks.forked[1].pid
    os.kill(pid, signal.SIGKILL)
    assert await lone.ends(caplog) == f"rank 2 (process {pid}) was killed by SIGKILL"


async def test_a_rank_that_is_stopped(lone: Lone, caplog: pytest.LogCaptureFixture) -> None:
    os.kill(lone.ranks.forked[0].pid, signal.SIGSTOP)
    why = await lone.ends(caplog)
    assert why == "rank 1 has been silent for 0.5 s (--silence-seconds)"


async def test_a_rank_whose_forward_fails(lone: Lone, caplog: pytest.LogCaptureFixture) -> None:
    """Collectives are out of step then; none of it can be taken up again."""
    lone.worker.ranks.step(b"\xc1 is no step")
    why = await lone.ends(caplog)
    assert "a forward failed on rank" in why, why


async def test_ranks_ignore_what_is_meant_for_their_leader(
    lone: Lone, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C in a terminal goes to all processes: the leader decides when they end."""
    for forked in lone.ranks.forked:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(forked.pid, number)
    verdict = await lone.worker.ranks.check()
    assert verdict.complaints() == ()
    lone.worker.loop.end(ExitCode.STOPPED, "the test is over")
    assert await lone.deployment.exit_code(lone.worker) is ExitCode.STOPPED


# Its peers: the whole writer elsewhere


class Fenced:
    """A decode worker here, writers elsewhere. What is freed is noted with who was dead then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.deployment = Deployment(GatewayPeer())
        self.gateway = self.deployment.gateway
        self.config = self.deployment.config(ATTENTIVE)
        executor = LeaderStandIn(PAGES, LAYOUT, ())
        self.decode = self.deployment.add_decode(executor, self.config)
        self.writers: list[Forked] = []
        self.dead_when_freed: list[bool] = []
        free = self.decode.pages.free

        def freed(pages: Any, owner: Any) -> None:
            if owner.kind is OwnerKind.LEASE and pages:
                self.dead_when_freed.append(all(map(is_dead, self.pids)))
            free(pages, owner)

        monkeypatch.setattr(self.decode.pages, "free", freed)

    @property
    def pids(self) -> list[int]:
        """Of the first writer: leader, then the others."""
        return list(self.writers[0].first["pids"])

    async def add(self, **changes: Any) -> None:
        config = Deployment.config_for(self.gateway.address, ATTENTIVE)
        task = RankTask("prefill", 0, 2, LAYOUT, config, **changes)
        self.writers.append(await asyncio.to_thread(Forked, process.prefill, task))
        endpoint = self.writers[-1].first["endpoint"]
        await until(lambda: endpoint in self.decode.table.usable_endpoints(), "pairing")

    async def begin(self) -> tuple[Stream, list[int]]:
        """A request whose pages are being written by the first writer's rank 1."""
        await self.add(holds_copies=True)
        prompt = prompt_of(30)
        sampling = Sampling(max_tokens=6, temperature=0.0)
        stream = self.gateway.submit(self.decode.incarnation, prompt, sampling)
        await until(lambda: "copy" in self.writers[0].said, "a copy that waits")
        return stream, prompt

    async def ends_well(self, stream: Stream, prompt: list[int]) -> None:
        """With another writer, and the first one's pages came back after its death."""
        await self.add()
        finished = await stream.end()
        assert finished.reason is FinishReason.LENGTH, finished
        assert stream.tokens == output_of(prompt, 6)
        assert self.dead_when_freed, "the first lease's pages were freed"
        assert self.dead_when_freed[0]


@pytest.fixture
async def fenced(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fenced]:
    fenced = Fenced(monkeypatch)
    yield fenced
    for writer in fenced.writers:
        writer.end()
    await fenced.deployment.quiet()
    await fenced.deployment.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_rank_lost_in_mid_transfer(fenced: Fenced, number: signal.Signals) -> None:
    """Its leader notices and ends, by itself."""
    stream, prompt = await fenced.begin()
    leader, rank = fenced.pids
    os.kill(rank, number)
    await until(lambda: is_dead(leader), "the end of its leader")
    await until(lambda: is_dead(rank), "its end")
    assert fenced.writers[0].process.exitcode in (None, ExitCode.CANNOT_GO_ON.value)
    await fenced.ends_well(stream, prompt)


async def test_a_leader_killed_in_mid_transfer(fenced: Fenced) -> None:
    """Its ranks die with it; the decode worker waits for that."""
    stream, prompt = await fenced.begin()
    leader, rank = fenced.pids
    os.kill(leader, signal.SIGKILL)
    await until(lambda: is_dead(rank), "the end of its rank")
    await fenced.ends_well(stream, prompt)


async def test_a_worker_that_is_stopped_is_killed_with_all_its_ranks(
    fenced: Fenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Welcome.ranks` names every process, and the fence is the death of all of them."""
    stream, prompt = await fenced.begin()
    killed: list[int] = []
    kill = ProcessHandle.kill

    def noted(handle: ProcessHandle) -> None:
        killed.append(handle.pid)
        kill(handle)

    monkeypatch.setattr(ProcessHandle, "kill", noted)
    for pid in fenced.pids:
        os.kill(pid, signal.SIGSTOP)
    await until(lambda: killed, "the fence")
    assert killed == fenced.pids
    await fenced.ends_well(stream, prompt)
