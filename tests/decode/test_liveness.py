"""Workers that stand still say so, to gateways and to probes, and recover by themselves."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx2
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdrt.kv.pages import OwnerKind
from pdrt.observe.worker_http import WorkerHttp
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.transfer.engine import OnSettled, WriteRequest
from pdrt.transfer.liveness import END_FACTOR, FORWARDS_FAILED_MAX, Ailment
from pdrt.transfer.local import LocalSender
from pdrt.transfer.processes import ProcessHandle
from pdrt.transfer.worker_loop import ExitCode
from tests.decode.deployment import (
    HANG_SECONDS,
    PROTOCOL,
    SCHEDULER,
    Pair,
    deployed,
    in_use,
    prompt_of,
    until,
)
from tests.prefill.executor import output_of
from tests.transfer.copies import CopyGate

ROLES = ("prefill", "decode")
STALL_SECONDS = SCHEDULER.stall_seconds_max


async def probe(http: WorkerHttp, path: str = "/ready") -> tuple[int, dict[str, Any]]:
    """As Kubernetes asks."""
    async with httpx2.AsyncClient(
        trust_env=False, base_url=http.url, timeout=HANG_SECONDS
    ) as client:
        answer = await client.get(path)
    return answer.status_code, answer.json()


async def told(pair: Pair, worker: Any, *, healthy: bool) -> str:
    """What the gateway has heard, once it is that; a reason, where there is one."""

    def is_told() -> bool:
        register = pair.gateway.registers.get(worker.incarnation)
        return register is not None and register.healthy == healthy

    await until(is_told, f"a gateway that hears it (healthy: {healthy})")
    return "; ".join(pair.gateway.registers[worker.incarnation].reasons)


def ailments(worker: Any) -> set[str]:
    """As its metrics show them."""
    families = text_string_to_metric_families(worker.view.render().decode())
    (family,) = [family for family in families if family.name == "pdrt_unhealthy"]
    assert len(family.samples) == len(Ailment)
    return {sample.labels["reason"] for sample in family.samples if sample.value}


@pytest.mark.parametrize("role", ROLES)
async def test_a_forward_that_hangs_turns_ready_red_until_it_returns(pair: Pair, role: str) -> None:
    worker, executor = getattr(pair, role), getattr(pair, f"{role}_executor")
    executor.gate.clear()
    stream = pair.submit(prompt_of(10), 4)
    await until(lambda: executor.is_running, "a step")
    executor.age = STALL_SECONDS + 1
    assert "a forward has been running for 61 s" in await told(pair, worker, healthy=False)
    status, body = await probe(worker.http)
    assert (status, body["ready"]) == (503, False)
    assert "a forward has been running for 61 s" in body["reasons"][0]
    assert ailments(worker) == {"forward_hangs"}
    assert pair.gateway.registers[worker.incarnation].hangs
    assert (await probe(worker.http, "/health"))[0] == 200, "it may come back: nobody restarts it"
    executor.age = 0.0
    executor.gate.set()
    assert (await stream.end()).reason is FinishReason.LENGTH
    await told(pair, worker, healthy=True)
    assert not pair.gateway.registers[worker.incarnation].hangs
    assert (await probe(worker.http)) == (200, {"ready": True, "reasons": []})
    assert ailments(worker) == set()


@pytest.mark.parametrize("role", ROLES)
async def test_a_forward_that_never_returns_ends_its_worker(
    pair: Pair, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever supervises it starts another one."""
    worker, executor = getattr(pair, role), getattr(pair, f"{role}_executor")
    executor.gate.clear()
    stream = pair.submit(prompt_of(10), 4)
    await until(lambda: executor.is_running, "a step")
    executor.age = END_FACTOR * STALL_SECONDS + 1
    assert await pair.deployment.exit_code(worker) is ExitCode.CANNOT_GO_ON
    (end,) = [record for record in caplog.records if record.getMessage() == "worker ends"]
    assert end.levelno == logging.ERROR
    assert vars(end)["why"] == "a forward has been running for 301 s"
    pair.deployment.forgive(worker)
    if role == "prefill":
        # Both live in one process, which no fence may end: its death is told here.
        table, endpoint = pair.decode.table, worker.handover.endpoint
        pair.decode.handover.apply(table.writer_dead(endpoint, worker.incarnation, 0.0))
        pair.cancel(stream)
        await stream.end()


async def test_a_full_quarantine_stops_admission_until_its_writer_has_drained(
    copies: CopyGate,
) -> None:
    """Nothing is lost meanwhile: who waits is served as soon as the pages are back."""
    protocol = msgspec.structs.replace(
        PROTOCOL, quarantine_after_seconds=0.01, quarantine_pages_max=3
    )
    copies.close()
    async with deployed(protocol=protocol) as pair:
        held = pair.submit(prompt_of(10), 6)
        await held.reach(1)
        pair.cancel(held)
        assert (await held.end()).reason is FinishReason.CANCELLED
        reason = await told(pair, pair.decode, healthy=False)
        assert reason.startswith("3 pages are quarantined (3 allowed)")
        assert (await probe(pair.decode.http))[0] == 503
        waiting = pair.submit(prompt_of(7, salt=1), 4)
        await until(lambda: pair.decode.scheduler.queued == 1, "one that waits")
        for _ in range(5):
            await pair.gateway.inspect(pair.decode.incarnation)
        assert len(pair.decode.table.leases) == 1, "no room is opened"
        assert in_use(pair.decode.pages, OwnerKind.LEASE) == 3, "and no page is freed"
        copies.open()
        assert (await waiting.end()).reason is FinishReason.LENGTH
        assert waiting.tokens == output_of(prompt_of(7, salt=1), 4)
        await told(pair, pair.decode, healthy=True)
        assert (await probe(pair.decode.http))[0] == 200


async def test_a_queue_in_which_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission is broken; forwards, heartbeats and probes are not."""
    scheduler = msgspec.structs.replace(SCHEDULER, stall_seconds_max=0.3)
    async with deployed(scheduler=scheduler) as pair:
        with monkeypatch.context() as broken:
            broken.setattr(pair.decode.admission, "_admit_one", lambda request, now: False)
            stream = pair.submit(prompt_of(10), 4)
            reason = await told(pair, pair.decode, healthy=False)
            assert "while 1 wait" in reason
        assert (await stream.end()).reason is FinishReason.LENGTH
        await told(pair, pair.decode, healthy=True)


async def test_a_client_that_does_not_read_is_no_stall(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = msgspec.structs.replace(SCHEDULER, stall_seconds_max=0.3, stream_tokens_max=3)
    protocol = msgspec.structs.replace(PROTOCOL, tick_late_seconds=0.05)
    async with deployed(protocol=protocol, scheduler=scheduler) as pair:
        stream = pair.submit(prompt_of(10), 8)
        await stream.reach(3)
        ticks = pair.decode.metrics._lag.counts
        before = sum(ticks)
        await until(lambda: sum(ticks) > before + 60, "ticks of 0.01 s")
        assert "not healthy" not in caplog.text
        pair.gateway.credit(pair.decode.incarnation, stream, 8)
        assert (await stream.end()).reason is FinishReason.LENGTH


async def test_a_worker_that_no_gateway_hears_is_not_ready(pair: Pair) -> None:
    """It would serve; nobody sends it anything."""
    for worker in (pair.prefill, pair.decode):
        assert (await probe(worker.http))[0] == 200
    pair.gateway.is_mute = True
    # Another life of the gateway, which has not answered yet.
    for worker in (pair.prefill, pair.decode):
        status = 200
        async with asyncio.timeout(HANG_SECONDS):
            while status == 200:  # an answer may have been on its way
                for link in worker.links._links:
                    link.registration.gateway = None
                status, body = await probe(worker.http)
        assert status == 503
        assert body["reasons"] == [f"gateway {pair.gateway.address} does not answer"]
    pair.gateway.is_mute = False
    for worker in (pair.prefill, pair.decode):
        await until(lambda worker=worker: not worker.links.complaints(), "an answer")
        assert (await probe(worker.http)) == (200, {"ready": True, "reasons": []})


async def test_an_engine_that_cannot_say_how_a_write_ended_is_fenced(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its completion queue is gone: no acknowledgement will ever come. No page is freed before the
    writer is dead."""
    killed: list[int] = []
    monkeypatch.setattr(ProcessHandle, "kill", lambda handle: killed.append(handle.pid))

    def write(sender: LocalSender, request: WriteRequest, on_settled: OnSettled) -> None:
        raise RuntimeError("the completion queue is gone")

    monkeypatch.setattr(LocalSender, "write", write)
    stream = pair.submit(prompt_of(10), 6)
    await until(lambda: killed, "the fence")
    for _ in range(5):
        await pair.gateway.inspect(pair.decode.incarnation)
    assert in_use(pair.decode.pages, OwnerKind.LEASE) == 3
    # Its death, which cannot be arranged for this process.
    writer, endpoint = pair.prefill.incarnation, pair.prefill.handover.endpoint
    pair.decode.handover.apply(pair.decode.table.writer_dead(endpoint, writer, 0.0))
    assert in_use(pair.decode.pages, OwnerKind.LEASE) == 0
    pair.cancel(stream)
    await stream.end()


@pytest.mark.parametrize("role", ROLES)
async def test_a_worker_whose_forwards_all_fail_draws_no_more_requests(
    pair: Pair, role: str
) -> None:
    """It would look idle, and be given everything; one that succeeds makes it well again."""
    worker, executor = getattr(pair, role), getattr(pair, f"{role}_executor")
    executor.failures = FORWARDS_FAILED_MAX + 1  # of prefill, each request has three
    while executor.failures:
        finished = await pair.submit(prompt_of(10), 4).end()
        assert finished.reason is FinishReason.FAILED
    reason = await told(pair, worker, healthy=False)
    assert "forwards in a row have failed, the last one with RuntimeError" in reason
    await pair.serves()
    await told(pair, worker, healthy=True)
