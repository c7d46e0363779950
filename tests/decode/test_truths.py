"""What workers say of themselves is true: broken tables are found, and nobody waits in vain."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdrt.ids import RequestId
from pdrt.kv.pages import Owner, OwnerKind
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.protocol.messages import Reason
from pdrt.transfer.worker_loop import ExitCode
from tests.decode.deployment import Deployment, Pair, deployed, prompt_of, until
from tests.prefill.executor import LAYOUT, StandInExecutor, output_of


def _free_an_owned_page(pair: Pair) -> Callable[[], None]:
    pages = pair.decode.pages
    owner = Owner(OwnerKind.SEQUENCE, RequestId(1, 2, 3))
    (page,) = pages.take(1, owner)
    pages._free.append(page)

    def mend() -> None:
        pages._free.remove(page)
        pages.free([page], owner)

    return mend


def _lose_a_connection(pair: Pair) -> Callable[[], None]:
    (peer,) = pair.decode.table.pairing.peers.values()
    peer.floor += 7

    def mend() -> None:
        peer.floor -= 7

    return mend


def _taint_nothing(pair: Pair) -> Callable[[], None]:
    (peer,) = pair.prefill.table.peers.known.values()
    (engine,) = peer.engines.values()
    engine.is_tainted = True

    def mend() -> None:
        engine.is_tainted = False

    return mend


@pytest.mark.parametrize("damage", [_free_an_owned_page, _lose_a_connection, _taint_nothing])
async def test_a_check_on_demand_finds_a_broken_table(
    pair: Pair, damage: Callable[[Pair], Callable[[], None]]
) -> None:
    for worker in (pair.decode, pair.prefill):
        worker.loop._on_tick = lambda now: None  # none finds it, or mends it, by itself
    mend = damage(pair)
    workers = (pair.decode.incarnation, pair.prefill.incarnation)
    reports = [await pair.gateway.inspect(worker) for worker in workers]
    mend()
    assert any(report.broken for report in reports)
    for worker in workers:
        assert not (await pair.gateway.inspect(worker)).broken


async def test_requests_wait_out_a_leaving_prefill_worker(pair: Pair) -> None:
    """Being turned away is no failure: the request waits for another prefill worker."""
    deployment: Deployment = pair.deployment
    held = pair.prefill_executor
    held.gate.clear()
    first = pair.submit(prompt_of(20), 4)
    await until(lambda: held.is_running, "a room that keeps the prefill worker")
    pair.prefill.loop._leave()
    second = pair.submit(prompt_of(30), 4)
    await until(lambda: not pair.decode.table.usable_endpoints(), "a prefill worker out of use")
    await until(lambda: second.request in pair.decode.scheduler.requests, "the second request")
    assert pair.decode.scheduler.requests[second.request].rooms_failed == 0
    deployment.add_prefill(StandInExecutor(64), deployment.config())
    held.gate.set()
    for stream, prompt in ((first, prompt_of(20)), (second, prompt_of(30))):
        assert (await stream.end()).reason is FinishReason.LENGTH
        assert stream.tokens == output_of(prompt, 4)
    assert pair.decode.table.stale.get(Reason.SHUTDOWN.value, 0) == 0
    assert await deployment.exit_code(pair.prefill) is ExitCode.STOPPED


@pytest.mark.parametrize("decode_pages", [64, LAYOUT.pages_for(96)])
async def test_a_prompt_of_all_the_context_that_wants_no_token(decode_pages: int) -> None:
    """Also where the pool holds no more than one such sequence."""
    async with deployed(decode_pages=decode_pages) as pair:
        limit = pair.decode.executor.identity.max_model_len
        assert limit == 96
        finished = await pair.submit(prompt_of(limit), 0).end()
        assert finished.reason is FinishReason.LENGTH, finished
        finished = await pair.submit(prompt_of(limit), 1).end()
        assert finished.reason is FinishReason.REJECTED
