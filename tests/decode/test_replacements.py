"""Workers that are replaced, unreachable for a while, or a socket that swallows everything: the
next request works, without a restart of anybody else and without a list of who once failed."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from pdrt.config import WorkerConfig
from pdrt.decode.worker import DecodeWorker
from pdrt.errors import ConfigError
from pdrt.ids import RoomId
from pdrt.kv.pages import OwnerKind
from pdrt.prefill.worker import PrefillWorker
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.protocol.messages import Drained, Outcome
from pdrt.sampling import Sampling
from pdrt.transfer.worker_loop import ExitCode
from tests.decode.deployment import (
    HANG_SECONDS,
    NEVER,
    PROTOCOL,
    Deployment,
    GatewayPeer,
    Pair,
    Stream,
    in_use,
    prompt_of,
    until,
)
from tests.prefill import process
from tests.prefill.executor import StandInExecutor, output_of
from tests.transfer.copies import CopyGate
from tests.transfer.forked import Forked

TIMES = 20
KILLS = 3
SAMPLING = Sampling(max_tokens=4, temperature=0.0)


@pytest.fixture
async def deployment() -> AsyncIterator[Deployment]:
    made = Deployment(GatewayPeer())
    yield made
    await made.quiet()
    await made.close()


async def serves(deployment: Deployment, decode: DecodeWorker, salt: int) -> Stream:
    """One request, by hand-over."""
    prompt = prompt_of(9, salt)
    stream = deployment.gateway.submit(decode.incarnation, prompt, SAMPLING)
    assert (await stream.end()).reason is FinishReason.LENGTH
    assert stream.tokens == output_of(prompt, 4)
    return stream


def is_paired(decode: DecodeWorker, prefill: PrefillWorker) -> bool:
    """With this one, not with whom was on its address before."""
    endpoint = prefill.handover.endpoint
    is_usable = endpoint in decode.table.usable_endpoints()
    return is_usable and decode.table.pairing.peers[endpoint].writer == prefill.incarnation


async def added(deployment: Deployment, config: WorkerConfig) -> PrefillWorker:
    """As soon as the one before has let go of its address: that sends its last words first."""
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            executor = StandInExecutor(64)
            try:
                return deployment.add_prefill(executor, config)
            except ConfigError:
                executor.close()
                await asyncio.sleep(0.01)


async def end(deployment: Deployment, worker: Any) -> None:
    """It ends, with all that it has."""
    worker.loop.end(ExitCode.STOPPED, "replaced")
    assert await deployment.exit_code(worker) is ExitCode.STOPPED
    worker.executor.close()
    deployment.forgive(worker)
    deployment.gateway.registers.pop(worker.incarnation, None)


async def test_the_prefill_worker_is_replaced_again_and_again(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    """Always on the same address, under a decode worker that stays."""
    caplog.set_level(logging.INFO, "pdrt.decode.handover")
    decode = deployment.add_decode(StandInExecutor(64), deployment.config())
    port = 0
    for life in range(TIMES):
        config = msgspec.structs.replace(deployment.config(), port=port)
        prefill = await added(deployment, config)
        endpoint = prefill.handover.endpoint
        port = int(endpoint.rpartition(":")[2])
        deployment.gateway.endpoints = (endpoint,)
        await until(lambda writer=prefill: is_paired(decode, writer), f"life {life}")
        stream = await serves(deployment, decode, life)
        assert stream.prefills == [prefill.incarnation]
        await end(deployment, prefill)
    assert decode.table.fences == 0
    said = [x for x in caplog.records if x.getMessage() == "a prefill worker writes here"]
    assert len(said) == TIMES, "once for each writer"


async def test_the_decode_worker_is_replaced_again_and_again(deployment: Deployment) -> None:
    """Under a prefill worker that stays: each life is a peer of its own."""
    prefill = deployment.add_prefill(StandInExecutor(64), deployment.config())
    for life in range(TIMES):
        decode = deployment.add_decode(StandInExecutor(64), deployment.config())
        await deployment.paired()
        stream = await serves(deployment, decode, life)
        assert stream.prefills == [prefill.incarnation]
        await end(deployment, decode)


@pytest.mark.e2e
async def test_a_prefill_worker_is_killed_again_and_again(deployment: Deployment) -> None:
    """SIGKILL in the middle of a prompt, and a successor on the same address: the request that was
    under way is answered by it, in another room."""
    patient = msgspec.structs.replace(PROTOCOL, unpaired_seconds_max=NEVER)
    decode = deployment.add_decode(StandInExecutor(64), deployment.config(patient))
    gateway, port = deployment.gateway, 0
    writers: list[Forked] = []

    async def add(hold: str, port: int) -> Forked:
        writer = await asyncio.to_thread(Forked, process.main, gateway.address, hold, False, port)
        writers.append(writer)
        gateway.endpoints = (writer.first["endpoint"],)
        return writer

    for life in range(KILLS):
        doomed = await add("steps", port)
        port = int(doomed.first["endpoint"].rpartition(":")[2])
        await until(decode.table.usable_endpoints, f"pairing with life {life}")
        prompt = prompt_of(9, life)
        stream = gateway.submit(decode.incarnation, prompt, SAMPLING)
        await until(lambda writer=doomed: "step of 1" in writer.said, "prefill")
        doomed.end()
        successor = await add("nothing", port)
        assert (await stream.end()).reason is FinishReason.LENGTH
        assert stream.tokens == output_of(prompt, 4)
        successor.end()
        await until(lambda: not decode.table.usable_endpoints(), "its loss")
    assert decode.table.next_room().serial - 1 >= 2 * KILLS, "two rooms for each"
    for writer in writers:
        writer.end()


async def test_needs_no_restart_after_a_blip(pair: Pair) -> None:
    """The endpoint is not listed for a moment, again and again: nobody remembers it against it."""
    endpoint = pair.prefill.handover.endpoint
    for _ in range(TIMES):
        pair.gateway.endpoints = ()
        pair.decode.links.announce(0.0)
        await until(lambda: not pair.decode.links.prefill_endpoints, "the blip")
        pair.gateway.endpoints = (endpoint,)
        pair.decode.links.announce(0.0)
        await until(pair.decode.table.usable_endpoints, "its return")
        await pair.serves()


async def test_a_socket_that_swallows_everything_holds_up_nobody(deployment: Deployment) -> None:
    """A prefill worker's machine is gone, or its process stands still: connections are taken, and
    never answered. Others serve, whatever piles up for it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dead = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        prefill = deployment.add_prefill(StandInExecutor(64), deployment.config())
        decode = deployment.add_decode(StandInExecutor(64), deployment.config())
        deployment.gateway.endpoints = (dead, prefill.handover.endpoint)
        deployment.gateway.preferred = (dead,)
        await until(decode.table.usable_endpoints, "pairing")
        streams = [await serves(deployment, decode, salt) for salt in range(3 * TIMES)]
        assert {stream.prefills[0] for stream in streams} == {prefill.incarnation}
        assert decode.table.usable_endpoints() == [prefill.handover.endpoint]
        deployment.gateway.endpoints = (prefill.handover.endpoint,)


async def test_a_retry_never_has_the_room_of_what_failed(pair: Pair, copies: CopyGate) -> None:
    """Nor its pages, as long as they may still be written into."""
    opened: list[tuple[RoomId, frozenset[int]]] = []
    grant = pair.decode.table.grant

    def granted(endpoint: str, request: Any, now: float) -> Any:
        held = frozenset(p for lease in pair.decode.table.leases.values() for p in lease.pages)
        assert held.isdisjoint(request.pages)
        opened.append((pair.decode.table.next_room(), frozenset(request.pages)))
        return grant(endpoint, request, now)

    pair.decode.table.grant = granted  # type: ignore[method-assign]
    copies.failures = 2
    stream = pair.submit(prompt_of(10), 6)
    assert (await stream.end()).reason is FinishReason.LENGTH
    assert stream.tokens == output_of(prompt_of(10), 6)
    serials = [room.serial for room, _ in opened]
    assert len(serials) >= 2
    assert serials == sorted(set(serials))


async def test_a_client_leaves_between_prefills_end_and_decodes_admission(pair: Pair) -> None:
    """The last word of prefill has arrived and has not been read when the client goes."""
    table = pair.decode.table
    receive, held = table.receive, list[tuple[str, Drained]]()

    def hold(endpoint: str, message: Any, now: float) -> Any:
        if isinstance(message, Drained):
            held.append((endpoint, message))
            return []
        return receive(endpoint, message, now)

    table.receive = hold  # type: ignore[method-assign]
    stream = pair.submit(prompt_of(10), 6)
    await until(lambda: held, "the last word")
    await stream.reach(1)
    ((endpoint, drained),) = held
    assert drained.outcome is Outcome.COMPLETE
    assert not pair.prefill.table.rooms, "prefill is done with it"
    pair.cancel(stream)
    assert (await stream.end()).reason is FinishReason.CANCELLED
    assert in_use(pair.decode.pages, OwnerKind.LEASE) == 3, "until it is known to be quiet"
    table.receive = receive  # type: ignore[method-assign]
    pair.decode.handover.apply(table.receive(endpoint, drained, 0.0))
    assert in_use(pair.decode.pages, OwnerKind.LEASE) == 0
    assert not pair.decode_executor.steps
    await pair.deployment.quiet()
    await pair.serves()


async def test_a_gateways_end_reaches_prefill_too() -> None:
    """Within the silence that makes it a lost one: prefill computes no further chunk for it."""
    deployment = Deployment(GatewayPeer())
    protocol = msgspec.structs.replace(PROTOCOL, silence_seconds=0.4, tick_late_seconds=0.1)
    prefill = deployment.add_prefill(StandInExecutor(64), deployment.config())
    decode = deployment.add_decode(StandInExecutor(64), deployment.config(protocol))
    await deployment.paired()
    prefill.executor.gate.clear()  # type: ignore[attr-defined]
    deployment.gateway.submit(decode.incarnation, prompt_of(60), SAMPLING)
    await until(lambda: prefill.executor.is_running, "a chunk")  # type: ignore[attr-defined]
    deployment.gateway.is_mute = True
    await until(lambda: any(r.reason for r in prefill.table.rooms.values()), "the Revoke")
    assert not decode.scheduler.requests
    prefill.executor.gate.set()  # type: ignore[attr-defined]
    await deployment.quiet()
    assert len(prefill.executor.steps) == 1  # type: ignore[attr-defined]
    deployment.gateway.is_mute = False
    await deployment.close()
