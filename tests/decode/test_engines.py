"""Whole workers over each engine: what is chosen, what is said of it, what breaks in mid-write."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Literal

import msgspec
import pytest

from pdrt.config import TransferConfig, WorkerConfig
from pdrt.decode.worker import DecodeWorker
from pdrt.prefill.worker import PrefillWorker
from pdrt.protocol.codec import VERSION_FRAME
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.protocol.leases import LeaseState
from pdrt.protocol.messages import PROTOCOL_VERSION
from pdrt.sampling import Sampling
from pdrt.transfer.engine import ByteRange, WriteRequest
from pdrt.transfer.tcp.memory import HostStage, Ranges
from pdrt.transfer.tcp.receiver import TcpReceiver
from pdrt.transfer.tcp.sender import TcpSender
from tests.decode.deployment import (
    HANG_SECONDS,
    Deployment,
    GatewayPeer,
    Stream,
    prompt_of,
    until,
)
from tests.prefill.executor import StandInExecutor, output_of

Flag = Literal["auto", "local", "tcp"]
PAGES = 64


def config_of(deployment: Deployment, transfer: Flag) -> WorkerConfig:
    engines = TransferConfig(transfer=transfer)
    return msgspec.structs.replace(deployment.config(), engines=engines)


class Workers:
    """A decode worker and prefill workers, with an engine each."""

    def __init__(self, decode: Flag, *prefills: Flag) -> None:
        self.deployment = deployment = Deployment(GatewayPeer())
        for flag in prefills:
            deployment.add_prefill(StandInExecutor(PAGES), config_of(deployment, flag))
        deployment.add_decode(StandInExecutor(PAGES), config_of(deployment, decode))

    @property
    def decode(self) -> DecodeWorker:
        return self.deployment.decodes[0]

    @property
    def prefill(self) -> PrefillWorker:
        return self.deployment.prefills[0]

    def submit(self, length: int, salt: int = 0) -> Stream:
        sampling = Sampling(max_tokens=6, temperature=0.0)
        gateway = self.deployment.gateway
        return gateway.submit(self.decode.incarnation, prompt_of(length, salt), sampling)

    async def serves(self, length: int = 40) -> None:
        stream = self.submit(length)
        assert (await stream.end()).reason is FinishReason.LENGTH
        assert stream.tokens == output_of(prompt_of(length), 6)

    def engine_to(self, prefill: PrefillWorker) -> str | None:
        return self.decode.table.pairing.peers[prefill.handover.endpoint].engine


@asynccontextmanager
async def working(decode: Flag, *prefills: Flag) -> AsyncIterator[Workers]:
    workers = Workers(decode, *prefills)
    await workers.deployment.paired()
    yield workers
    await workers.deployment.quiet()
    await workers.deployment.close()


class Gate:
    """Pieces wait before their first byte is taken, while it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_open = threading.Event()
        self._is_open.set()
        self.waiting = 0
        take = HostStage.take

        def gated(stage: HostStage, connection: socket.socket, ranges: Ranges) -> None:
            self.waiting += 1
            assert self._is_open.wait(HANG_SECONDS)
            self.waiting -= 1
            take(stage, connection, ranges)

        monkeypatch.setattr(HostStage, "take", gated)

    def close(self) -> None:
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def receiver_of(decode: DecodeWorker) -> TcpReceiver:
    receiver = decode.rank.parts.receivers["tcp"]
    assert isinstance(receiver, TcpReceiver)
    return receiver


# The choice


async def test_each_pair_uses_the_best_that_it_has() -> None:
    async with working("auto", "auto", "tcp") as workers:
        one, other = workers.deployment.prefills
        assert (workers.engine_to(one), workers.engine_to(other)) == ("local", "tcp")
        for prefill in (one, other):
            workers.deployment.gateway.preferred = (prefill.handover.endpoint,)
            await workers.serves()
        metrics = workers.decode.view.render().decode()
        for engine in ("local", "tcp"):
            assert f'pdrt_writers{{engine="{engine}",role="decode",' in metrics
        status = msgspec.json.decode(workers.decode.view.status())
        passed_over = {w["engine"]: w["passed_over"] for w in status["writers"]}
        assert passed_over["local"] == []
        assert passed_over["tcp"][0] == "local: prefill does not offer it"
        [peer] = msgspec.json.decode(other.view.status())["decode_peers"]
        assert peer["engine"] == "tcp"


async def test_a_pair_without_a_common_engine_says_so_and_hangs_nobody() -> None:
    workers = Workers("tcp", "local")
    registers = workers.deployment.gateway.registers

    def refused() -> tuple[str, ...]:
        register = registers.get(workers.decode.incarnation)
        return () if register is None else register.refused

    await until(refused, "the refusal")
    [text] = refused()
    assert "decode offers tcp, prefill has local" in text
    assert not workers.decode.table.usable_endpoints()
    await workers.deployment.close()


async def test_a_worker_of_another_version_is_named() -> None:
    """Neither understands the other: a frame that is no more than a version says what there is."""
    async with working("auto", "auto") as workers:
        decode, endpoint = workers.decode, workers.prefill.handover.endpoint
        other = bytes([PROTOCOL_VERSION + 1])
        decode.handover._channels[endpoint]._on_frame(other)
        [text] = decode.view.refused_pairs()
        assert f"version {PROTOCOL_VERSION + 1}, here is {PROTOCOL_VERSION}" in text
        await until(lambda: not decode.view.refused_pairs(), "a frame that is understood")


async def test_a_frame_of_another_version_is_answered_with_ours() -> None:
    async with working("auto", "auto") as workers:
        sent: list[bytes] = []
        workers.prefill.handover._channel.send = (  # type: ignore[method-assign]
            lambda peer, frame: bool(sent.append(frame)) or peer == b"w1"
        )
        workers.prefill.handover._receive(b"w1", bytes([PROTOCOL_VERSION + 1]) + b"whatever")
        assert VERSION_FRAME in sent
        assert workers.prefill.handover.rejected["version"] == 1
        del workers.prefill.handover._channel.send  # the method again


# In the middle of a write


async def test_requests_are_served_through_sockets() -> None:
    async with working("tcp", "tcp") as workers:
        for length in (1, 7, 16, 40, 80):
            await workers.serves(length)
        assert workers.decode.table.fences == 0
        assert not receiver_of(workers.decode).refused_pieces
        assert not len(workers.decode.rank.parts.rooms)


async def test_a_client_that_leaves_while_pages_are_on_their_way(gate: Gate) -> None:
    async with working("tcp", "tcp") as workers:
        await workers.serves()
        gate.close()
        stream = workers.submit(40, salt=1)
        await until(lambda: gate.waiting, "a piece on its way")
        workers.deployment.gateway.cancel(workers.decode.incarnation, stream)
        assert (await stream.end()).reason is FinishReason.CANCELLED
        leases = workers.decode.table.leases.values()
        await until(lambda: [x.state for x in leases] == [LeaseState.REVOKING], "the revocation")
        assert workers.decode.pages.counts(), "the answer waits for no drain, its pages do"
        gate.open()
        await until(lambda: not workers.decode.table.leases, "the drain")
        assert workers.decode.table.fences == 0
        assert not receiver_of(workers.decode).refused_pieces
        await workers.serves()


async def test_a_lost_connection_costs_one_fence_and_no_request(gate: Gate) -> None:
    async with working("tcp", "tcp") as workers:
        await workers.serves()
        gate.close()
        stream = workers.submit(40, salt=1)
        await until(lambda: gate.waiting, "a piece on its way")
        sender = workers.prefill.rank.parts.senders["tcp"]
        assert isinstance(sender, TcpSender)
        [instance] = sender._instances.values()

        def is_fenced() -> bool:
            # Again and again: one that was still being dialled has nothing to hang up.
            for connection in instance.routes[0]._connections:
                connection.hang_up()
            return workers.decode.table.fences > 0

        await until(is_fenced, "the fence")
        assert workers.decode.table.leases, "torn down is what is confirmed"
        gate.open()
        assert (await stream.end()).reason is FinishReason.LENGTH
        assert stream.tokens == output_of(prompt_of(40, 1), 6)
        await until(lambda: not workers.decode.table.leases, "pages come back")
        assert workers.decode.table.fences_by_engine == {"tcp": 1}
        await workers.serves()


async def test_a_writer_that_writes_after_its_lease_has_ended_is_not_let_in() -> None:
    """Members are trusted; a broken one harms nobody all the same."""
    async with working("tcp", "tcp") as workers:
        await workers.serves()
        sender = workers.prefill.rank.parts.senders["tcp"]
        [(decode, generation)] = sender._instances  # type: ignore[attr-defined]
        room = workers.decode.table.next_room()
        past = msgspec.structs.replace(room, serial=room.serial - 1)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        size = workers.prefill.executor.layout.page_bytes
        request = WriteRequest(past, generation, 0, (ByteRange(0, 0, size),))
        sender.write(request, lambda outcome, detail: answer.set_result(detail))
        assert "over" in await asyncio.wait_for(answer, HANG_SECONDS)
        assert receiver_of(workers.decode).refused_pieces == {"no_room": 1}
        assert "pdrt_refused_writes_total" in workers.decode.view.render().decode()
        assert decode == workers.decode.incarnation
