"""`--kv-checksum` over real sockets and copies: what landed wrong is never decoded from."""

from __future__ import annotations

import asyncio
import ctypes
import threading

import pytest

from pdrt.decode.worker import DecodeWorker
from pdrt.kv.pages import OwnerKind
from pdrt.prefill.worker import PrefillWorker
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.protocol.messages import Reason
from pdrt.transfer.engine import WriteRequest
from pdrt.transfer.local import LocalSender
from pdrt.transfer.local import _Instance as Instance
from pdrt.transfer.processes import ProcessHandle
from tests.decode.deployment import (
    HANG_SECONDS,
    Deployment,
    GatewayPeer,
    Pair,
    deployed,
    in_use,
    until,
)
from tests.decode.deployment import prompt_of as prompt
from tests.prefill.executor import LAYOUT, StandInExecutor, output_of


class BrokenCopies:
    """The next `count` copies end well, with one bit turned in the last byte that they wrote."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = LocalSender._copy

        def copy(sender: LocalSender, instance: Instance, request: WriteRequest) -> None:
            original(sender, instance, request)
            if self.count:
                self.count -= 1
                last = request.ranges[-1]
                address = instance.addresses[request.decode_rank]
                byte = ctypes.c_uint8.from_address(address + last.target_offset + last.length - 1)
                byte.value ^= 1

        monkeypatch.setattr(LocalSender, "_copy", copy)


class Comparisons:
    """What a worker computes checksums with waits while it is closed."""

    def __init__(self, worker: PrefillWorker | DecodeWorker) -> None:
        self._may_go_on = threading.Event()
        self._may_go_on.set()
        self.waiting = 0
        checksums = worker.rank.parts.checksums
        original = checksums._digest

        def digest(data: memoryview) -> int:
            self.waiting += 1
            assert self._may_go_on.wait(HANG_SECONDS)
            self.waiting -= 1
            return original(data)

        checksums._digest = digest

    def close(self) -> None:
        self._may_go_on.clear()

    def open(self) -> None:
        self._may_go_on.set()


def pages_compared(pair: Pair, result: str) -> int:
    for line in pair.decode.view.render().decode().splitlines():
        if line.startswith("pdrt_kv_checksum_pages_total") and f'"{result}"' in line:
            return int(float(line.split()[-1]))
    return 0


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> BrokenCopies:
    return BrokenCopies(monkeypatch)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    killed: list[int] = []
    monkeypatch.setattr(ProcessHandle, "kill", lambda handle: killed.append(handle.pid))
    return killed


def fenced(pair: Pair) -> None:
    """The death of the writer, which cannot be arranged for this process."""
    writer, endpoint = pair.prefill.incarnation, pair.prefill.handover.endpoint
    pair.decode.handover.apply(pair.decode.table.writer_dead(endpoint, writer, 0.0))


async def test_every_page_is_compared() -> None:
    async with deployed(kv_checksum=True) as pair:
        wanted = 0
        for length in (1, 4, 5, 16, 17, 40):
            text = prompt(length, salt=length)
            stream = pair.submit(text, 9)
            assert (await stream.end()).reason is FinishReason.LENGTH
            assert stream.tokens == output_of(text, 9)
            wanted += LAYOUT.pages_for(length)
        assert pages_compared(pair, "equal") == wanted
        assert pages_compared(pair, "different") == 0


async def test_only_what_was_sent_is_compared() -> None:
    """Pages that the decode side had already are not, and none where nothing is decoded."""
    async with deployed(kv_checksum=True) as pair:
        for length, max_tokens, wanted in (
            (20, 0, 0),
            (20, 1, 0),
            (20, 2, 5),
            (20, 2, 5),
            (22, 2, 6),
        ):
            await pair.submit(prompt(length), max_tokens).end()
            assert pages_compared(pair, "equal") == wanted


@pytest.mark.parametrize("chunk", [0, 1])
async def test_a_page_that_landed_wrong(
    copies: BrokenCopies, killed: list[int], caplog: pytest.LogCaptureFixture, chunk: int
) -> None:
    """The request goes on with another prefill worker; the pages wait for the writer's death."""
    async with deployed(kv_checksum=True) as pair:
        first = pair.prefill_executor
        first.gate.clear()
        stream = pair.submit(prompt(30), 6)
        for done in range(chunk):
            await until(lambda done=done: len(first.steps) == done + 1, "a chunk")
            first.gate.step()
        await until(lambda: len(first.steps) == chunk + 1, "the chunk whose copy breaks")
        (room,) = pair.decode.table.leases
        await until(lambda: pair.prefill.rank.tasks[room].writer.outstanding == 0, "quiet")
        copies.count = 1
        first.gate.set()
        await until(lambda: killed, "the fence")
        pages = pair.decode.table.leases[room].pages
        assert in_use(pair.decode.pages, OwnerKind.LEASE) == len(pages) == 8
        assert pair.decode.table.leases[room].reason is Reason.CHECKSUM_MISMATCH
        pair.deployment.add_prefill(StandInExecutor(64), pair.deployment.config())
        assert (await stream.end()).reason is FinishReason.LENGTH
        assert stream.tokens == output_of(prompt(30), 6)
        assert set(pages) == pair.decode.pages.pages_of(OwnerKind.LEASE).popitem()[1]
        line = next(x for x in caplog.records if "what landed is not" in x.message)
        assert (line.room, line.page_indices) == (room, ((3, 7)[chunk],))
        assert pages_compared(pair, "different") == 1
        assert len(killed) == 1
        fenced(pair)


async def test_broken_in_every_room_fails_the_request(
    copies: BrokenCopies, killed: list[int]
) -> None:
    """Not one token that follows the first comes out of a page that is not proved."""
    async with deployed(kv_checksum=True) as pair:
        for _ in range(2):
            pair.deployment.add_prefill(StandInExecutor(64), pair.deployment.config())
        await pair.deployment.paired()
        copies.count = 3
        stream = pair.submit(prompt(10), 6)
        finished = await stream.end()
        assert finished.reason is FinishReason.FAILED
        assert "do not hold what was sent" in finished.detail
        assert stream.tokens == output_of(prompt(10), len(stream.tokens))
        assert len(killed) == 3
        for prefill in pair.deployment.prefills:
            endpoint, table = prefill.handover.endpoint, pair.decode.table
            pair.decode.handover.apply(table.writer_dead(endpoint, prefill.incarnation, 0.0))


async def test_the_client_leaves_while_pages_are_compared() -> None:
    async with deployed(kv_checksum=True) as pair:
        comparisons = Comparisons(pair.decode)
        comparisons.close()
        stream = pair.submit(prompt(10), 6)
        await until(lambda: comparisons.waiting, "a comparison")
        await stream.reach(1)
        assert stream.tokens == output_of(prompt(10), 1), "the first token waits for nothing"
        pair.cancel(stream)
        assert (await stream.end()).reason is FinishReason.CANCELLED
        await pair.gateway.inspect(pair.decode.incarnation)
        assert in_use(pair.decode.pages, OwnerKind.LEASE) == 3
        comparisons.open()
        await pair.deployment.quiet()
        await pair.serves()


async def test_the_loop_does_not_wait_for_a_comparison() -> None:
    async with deployed(kv_checksum=True) as pair:
        comparisons = Comparisons(pair.decode)
        comparisons.close()
        streams = [pair.submit(prompt(10, salt), 6) for salt in range(3)]
        await until(lambda: comparisons.waiting, "a comparison")
        for _ in range(3):
            assert not (await pair.gateway.inspect(pair.decode.incarnation)).broken
        assert (await pair.submit(prompt(5), 1).end()).reason is FinishReason.LENGTH
        comparisons.open()
        for salt, stream in enumerate(streams):
            assert (await stream.end()).reason is FinishReason.LENGTH
            assert stream.tokens == output_of(prompt(10, salt), 6)


async def test_the_writer_dies_while_its_pages_are_compared() -> None:
    """They are clean, but the request need not wait to learn so: it goes on elsewhere."""
    async with deployed(kv_checksum=True) as pair:
        comparisons = Comparisons(pair.decode)
        comparisons.close()
        stream = pair.submit(prompt(10), 6)
        await until(lambda: comparisons.waiting, "a comparison")
        fenced(pair)
        comparisons.open()
        pair.deployment.add_prefill(StandInExecutor(64), pair.deployment.config())
        assert (await stream.end()).reason is FinishReason.LENGTH
        assert stream.tokens == output_of(prompt(10), 6)


async def test_a_worker_ends_in_the_middle_of_a_comparison() -> None:
    async with asyncio.timeout(HANG_SECONDS), deployed(kv_checksum=True) as pair:
        comparisons = Comparisons(pair.decode)
        comparisons.close()
        pair.submit(prompt(10), 6)
        await until(lambda: comparisons.waiting, "a comparison")
        for _ in range(2):
            pair.decode.loop._leave()
        await pair.deployment.exit_code(pair.decode)
        comparisons.open()


@pytest.mark.parametrize("with_it", ["prefill", "decode"])
async def test_both_or_neither(with_it: str) -> None:
    deployment = Deployment(GatewayPeer())
    deployment.kv_checksum = with_it == "prefill"
    prefill = deployment.add_prefill(StandInExecutor(16), deployment.config())
    deployment.kv_checksum = with_it == "decode"
    decode = deployment.add_decode(StandInExecutor(16), deployment.config())
    deployment.gateway.endpoints = (prefill.handover.endpoint,)
    await until(decode.view.refused_pairs, "a refusal")
    (refusal,) = decode.view.refused_pairs()
    ours, theirs = with_it == "prefill", with_it == "decode"
    assert f"kv_checksum: {ours} != {theirs}" in refusal
    await deployment.close()
