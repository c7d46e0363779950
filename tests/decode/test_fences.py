"""Real writers that hang and die: their pages come back after their death and not before."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from pdrt.decode.worker import DecodeWorker
from pdrt.kv.pages import OwnerKind
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.sampling import Sampling
from pdrt.transfer.processes import ProcessHandle
from tests.decode.deployment import (
    NEVER,
    PROTOCOL,
    Deployment,
    GatewayPeer,
    in_use,
    prompt_of,
    until,
)
from tests.prefill import process
from tests.prefill.executor import StandInExecutor, output_of
from tests.transfer.forked import Forked

KILL = ProcessHandle.kill

pytestmark = pytest.mark.e2e


class Writer(Forked):
    """A prefill worker in a process of its own."""

    def __init__(self, gateway: str, hold: str, kv_checksum: bool) -> None:
        super().__init__(process.main, gateway, hold, kv_checksum)
        self.endpoint: str = self.first["endpoint"]


class Fences:
    """One decode worker here, writers elsewhere; notes the order of kill, death and freeing."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, kv_checksum: bool = False, **changes: float
    ) -> None:
        self.deployment = Deployment(GatewayPeer())
        self.deployment.kv_checksum = kv_checksum
        self.gateway = self.deployment.gateway
        protocol = msgspec.structs.replace(PROTOCOL, **changes)
        self.executor = StandInExecutor(64)
        self.decode: DecodeWorker = self.deployment.add_decode(
            self.executor, self.deployment.config(protocol)
        )
        self.writers: list[Writer] = []
        self.events: list[str] = []

        def kill(handle: ProcessHandle) -> None:
            assert handle.pid in {w.pid for w in self.writers}, "not one of ours"
            assert not handle.is_dead()
            self.events.append("killed")
            KILL(handle)

        monkeypatch.setattr(ProcessHandle, "kill", kill)
        dead, free = self.decode.table.writer_dead, self.decode.pages.free

        def writer_dead(*arguments: Any) -> Any:
            self.events.append("dead")
            return dead(*arguments)

        def freed(pages: Any, owner: Any) -> None:
            if owner.kind is OwnerKind.LEASE and pages:
                self.events.append("freed")
            free(pages, owner)

        monkeypatch.setattr(self.decode.table, "writer_dead", writer_dead)
        monkeypatch.setattr(self.decode.pages, "free", freed)

    async def add(self, hold: str = "nothing") -> Writer:
        kv_checksum = self.deployment.kv_checksum
        writer = await asyncio.to_thread(Writer, self.gateway.address, hold, kv_checksum)
        self.writers.append(writer)
        await until(lambda: writer.endpoint in self.decode.table.usable_endpoints(), "pairing")
        return writer

    def submit(self, prompt: list[int]) -> Any:
        sampling = Sampling(max_tokens=6, temperature=0.0)
        return self.gateway.submit(self.decode.incarnation, prompt, sampling)

    async def served(self, stream: Any, prompt: list[int]) -> None:
        finished = await stream.end()
        assert finished.reason is FinishReason.LENGTH, finished
        assert stream.tokens == output_of(prompt, 6)


@pytest.fixture
def kv_checksum() -> bool:
    """Tests that want it say so."""
    return False


@pytest.fixture
def patience_seconds() -> float:
    """How long a lost writer may live. A slow machine may make one look lost: what is not about
    such a writer's end must not end it."""
    return NEVER


@pytest.fixture
async def fences(
    monkeypatch: pytest.MonkeyPatch, kv_checksum: bool, patience_seconds: float
) -> AsyncIterator[Fences]:
    fences = Fences(
        monkeypatch,
        kv_checksum,
        silence_seconds=1.0,
        tick_late_seconds=0.3,
        kill_lost_after_seconds=patience_seconds,
        quarantine_after_seconds=0.2,
    )
    yield fences
    for writer in fences.writers:
        writer.end()
    await fences.deployment.quiet()
    await fences.deployment.close()


@pytest.mark.parametrize("patience_seconds", [1.0])
async def test_a_writer_that_is_stopped_in_mid_prefill(fences: Fences) -> None:
    first = await fences.add("steps")
    prompt = prompt_of(40)
    stream = fences.submit(prompt)
    await until(lambda: "step of 1" in first.said, "prefill")
    os.kill(first.pid, signal.SIGSTOP)
    await until(lambda: not fences.decode.table.usable_endpoints(), "its loss")
    # Lost is not dead: the request lets go of the room, the room keeps its pages.
    assert in_use(fences.decode.pages, OwnerKind.LEASE) == 11
    assert fences.decode.table.quarantined_pages(1e12) == 11
    await until(lambda: fences.decode.scheduler.queued == 1, "the request")
    assert "freed" not in fences.events
    await until(lambda: "freed" in fences.events, "its pages")
    assert fences.events == ["killed", "dead", "freed"]
    await until(lambda: not first.process.is_alive(), "its end, as its parent sees it")
    assert fences.decode.table.fences == 1
    # The request goes on where another one appears.
    await fences.add()
    await fences.served(stream, prompt)


async def test_a_writer_that_wakes_in_time_is_not_killed(fences: Fences) -> None:
    """What it was writing is drained by itself, its room having been revoked."""
    first = await fences.add("steps")
    prompt = prompt_of(40)
    stream = fences.submit(prompt)
    await until(lambda: "step of 1" in first.said, "prefill")
    os.kill(first.pid, signal.SIGSTOP)
    await until(lambda: fences.decode.scheduler.queued == 1, "its loss")
    assert in_use(fences.decode.pages, OwnerKind.LEASE) == 11
    os.kill(first.pid, signal.SIGCONT)
    first.connection.send("open")
    await fences.served(stream, prompt)
    await until(lambda: not fences.decode.table.leases, "the drain of the old room")
    assert "killed" not in fences.events
    assert "dead" not in fences.events


async def test_a_writer_that_dies_in_mid_transfer(fences: Fences) -> None:
    first = await fences.add("copies")
    prompt = prompt_of(40)
    stream = fences.submit(prompt)
    await until(lambda: "copy" in first.said, "a copy")
    assert in_use(fences.decode.pages, OwnerKind.LEASE) == 11
    first.process.kill()
    await until(lambda: "freed" in fences.events, "its pages")
    assert fences.events == ["dead", "freed"]
    await fences.add()
    await fences.served(stream, prompt)
    assert fences.decode.table.fences == 0


@pytest.mark.parametrize("patience_seconds", [1.0])
async def test_a_client_that_leaves_while_the_writer_hangs(fences: Fences) -> None:
    """The client has its answer at once; the pages wait for the proof."""
    first = await fences.add("steps")
    stream = fences.submit(prompt_of(40))
    await until(lambda: "step of 1" in first.said, "prefill")
    os.kill(first.pid, signal.SIGSTOP)
    fences.gateway.cancel(fences.decode.incarnation, stream)
    assert (await stream.end()).reason is FinishReason.CANCELLED
    assert in_use(fences.decode.pages, OwnerKind.LEASE) == 11
    assert fences.events == []
    await until(lambda: "freed" in fences.events, "its pages")
    assert fences.events == ["killed", "dead", "freed"]


async def test_a_writer_dies_while_another_serves(fences: Fences) -> None:
    first = await fences.add("steps")
    await fences.add()
    fences.gateway.preferred = (first.endpoint,)
    prompts = [prompt_of(20, salt) for salt in range(4)]
    streams = [fences.submit(prompt) for prompt in prompts]
    await until(lambda: first.said, "prefill")
    first.process.kill()
    for stream, prompt in zip(streams, prompts, strict=True):
        await fences.served(stream, prompt)
    assert fences.events[0] == "dead"
    assert "killed" not in fences.events


async def test_a_writer_that_is_told_to_stop(fences: Fences) -> None:
    """It finishes what it has, and nothing needs a fence."""
    first = await fences.add("steps")
    prompt = prompt_of(40)
    stream = fences.submit(prompt)
    await until(lambda: "step of 1" in first.said, "prefill")
    first.process.terminate()
    await until(lambda: not fences.decode.table.usable_endpoints(), "its refusal")
    first.connection.send("open")
    await fences.served(stream, prompt)
    await until(lambda: not first.process.is_alive(), "its end")
    assert first.process.exitcode == 0
    assert "killed" not in fences.events
    assert "freed" not in fences.events


@pytest.mark.parametrize("kv_checksum", [True])
async def test_a_writer_whose_copies_are_broken(fences: Fences) -> None:
    """It says that all has landed, but that is not what it sent: its pages wait for its death, and
    nothing is decoded from them."""
    first = await fences.add("broken")
    prompt = prompt_of(40)
    stream = fences.submit(prompt)
    await until(lambda: "freed" in fences.events, "its pages")
    assert fences.events == ["killed", "dead", "freed"]
    assert stream.tokens == output_of(prompt, 1), "the token that needed no page, and no other"
    await until(lambda: not first.process.is_alive(), "its end, as its parent sees it")
    await fences.add()
    await fences.served(stream, prompt)
