"""What goes wrong between two workers, and what the client hears of it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

import msgspec
import pytest

from pdrt.ids import Incarnation, RequestId, RoomId, new_incarnation
from pdrt.kv.pages import OwnerKind
from pdrt.model.batch import StepResult
from pdrt.prefill import worker as prefill_worker
from pdrt.prefill.worker import PrefillWorker
from pdrt.protocol.codec import encode
from pdrt.protocol.gateway_messages import FinishReason, Submit
from pdrt.protocol.messages import Outcome, Reason
from pdrt.protocol.room_writer import RankEnd
from pdrt.sampling import Sampling
from pdrt.transfer.channel import DealerChannel
from pdrt.transfer.processes import ProcessHandle
from pdrt.transfer.room_task import RoomTask
from pdrt.transfer.worker_loop import ExitCode
from tests.decode.deployment import (
    FRAME_BYTES,
    PROTOCOL,
    SCHEDULER,
    Deployment,
    GatewayPeer,
    Pair,
    deployed,
    in_use,
    prompt_of,
    until,
)
from tests.prefill.executor import LAYOUT, StandInExecutor, identity, output_of
from tests.transfer.copies import CopyGate


@pytest.mark.parametrize("failures", [1, 2])
async def test_a_failed_prefill_is_tried_again_in_a_new_room(pair: Pair, failures: int) -> None:
    pair.prefill_executor.failures = failures
    stream = pair.submit(prompt_of(20), 6)
    assert (await stream.end()).reason is FinishReason.LENGTH
    assert stream.tokens == output_of(prompt_of(20), 6)


async def test_a_prefill_that_fails_in_every_room_fails_the_request(pair: Pair) -> None:
    pair.prefill_executor.failures = 3
    finished = await pair.submit(prompt_of(10), 6).end()
    assert finished.reason is FinishReason.FAILED
    assert "on purpose" in finished.detail
    assert pair.prefill_executor.failures == 0
    await pair.serves()


async def test_a_prefill_that_fails_in_a_later_chunk(pair: Pair) -> None:
    """Pages of the first chunk have been written; the second room has other ones."""
    pair.prefill_executor.gate.clear()
    stream = pair.submit(prompt_of(40), 6)
    await until(lambda: pair.prefill_executor.is_running, "the first chunk")
    pair.prefill_executor.gate.step()
    await until(lambda: len(pair.prefill_executor.steps) == 2, "the second chunk")
    pair.prefill_executor.failures = 1
    pair.prefill_executor.gate.set()
    assert (await stream.end()).reason is FinishReason.LENGTH
    assert stream.tokens == output_of(prompt_of(40), 6)


async def test_a_failed_step_fails_its_requests(pair: Pair) -> None:
    pair.decode_executor.gate.clear()
    streams = [pair.submit(prompt_of(10, salt), 6) for salt in range(3)]
    await until(lambda: pair.decode.scheduler.running == 3, "three sequences")
    pair.decode_executor.failures = 3
    pair.decode_executor.gate.set()
    for stream in streams:
        finished = await stream.end()
        assert finished.reason is FinishReason.FAILED
        assert "on purpose" in finished.detail
    pair.decode_executor.failures = 0
    await pair.serves()


async def test_a_failed_step_of_a_cancelled_request(pair: Pair) -> None:
    pair.decode_executor.gate.clear()
    stream = pair.submit(prompt_of(10), 6)
    await until(lambda: pair.decode_executor.is_running, "a step")
    pair.cancel(stream)
    await pair.gateway.inspect(pair.decode.incarnation)
    pair.decode_executor.failures = 1
    pair.decode_executor.gate.set()
    assert (await stream.end()).reason is FinishReason.CANCELLED
    assert stream.finishes == 1


async def test_a_failed_copy_is_tried_again_in_a_new_room(pair: Pair, copies: CopyGate) -> None:
    copies.failures = 1
    stream = pair.submit(prompt_of(10), 6)
    assert (await stream.end()).reason is FinishReason.LENGTH
    assert stream.tokens == output_of(prompt_of(10), 6)


async def test_a_copy_fails_while_another_is_under_way(pair: Pair, copies: CopyGate) -> None:
    """The room is closing on its rank, its leader does not know, and plans the next chunk."""
    copies.close()
    stream = pair.submit(prompt_of(60), 6)
    await until(lambda: len(pair.prefill_executor.steps) == 4, "every chunk")
    copies.failures = 1
    copies.open()
    assert (await stream.end()).reason is FinishReason.LENGTH
    assert stream.tokens == output_of(prompt_of(60), 6)


def overheard(task: RoomTask) -> list[Outcome]:
    """How the room ends on its rank."""
    ends: list[Outcome] = []
    on_end = task._on_end

    def listen(room: RoomId, end: RankEnd) -> None:
        ends.append(end.outcome)
        on_end(room, end)

    task._on_end = listen
    return ends


async def test_a_chunk_is_planned_for_a_room_that_closes(pair: Pair, copies: CopyGate) -> None:
    """The first write has failed, the second has not settled: the room closes on its rank and
    cannot say so yet. The leader goes on with its chunks: the forward counts as any other."""
    copies.close()
    pair.prefill_executor.gate.clear()
    stream = pair.submit(prompt_of(60), 6)
    await until(lambda: pair.prefill_executor.is_running, "a chunk")
    ((_, task),) = pair.prefill.rank.tasks.items()
    ends = overheard(task)
    pair.prefill_executor.gate.step()
    await until(lambda: len(pair.prefill_executor.steps) == 2, "the second chunk")
    pair.prefill_executor.gate.step()
    await until(lambda: len(pair.prefill_executor.steps) == 3, "the third chunk")
    copies.failures = 1
    await until(lambda: task.writer.outstanding == 2, "two writes")
    copies.step()
    await until(lambda: task.writer.outstanding == 1, "the failure")
    pair.prefill_executor.gate.step()
    await until(lambda: len(pair.prefill_executor.steps) == 4, "the last chunk")
    pair.prefill_executor.gate.set()
    copies.open()
    assert (await stream.end()).reason is FinishReason.LENGTH
    assert ends == [Outcome.ENDED]
    assert stream.tokens == output_of(prompt_of(60), 6)


async def test_a_room_task_breaks_during_a_forward(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its source pages are being filled: they stay its own until the forward has returned."""
    killed: list[int] = []
    monkeypatch.setattr(ProcessHandle, "kill", lambda handle: killed.append(handle.pid))
    pair.prefill_executor.gate.clear()
    stream = pair.submit(prompt_of(40), 6)
    await until(lambda: pair.prefill_executor.is_running, "a forward")
    (room,) = pair.prefill.table.rooms
    task = pair.prefill.rank.tasks[room]
    task.post("nonsense")  # type: ignore[arg-type]
    for _ in range(10):
        await pair.gateway.inspect(pair.prefill.incarnation)
    assert in_use(pair.prefill.pages, OwnerKind.ROOM) == 10
    pair.prefill_executor.gate.set()
    await until(lambda: killed, "the fence")
    assert in_use(pair.decode.pages, OwnerKind.LEASE) >= 11
    # Its death, which cannot be arranged for this process.
    writer = pair.prefill.incarnation
    endpoint = pair.prefill.handover.endpoint
    pair.decode.handover.apply(pair.decode.table.writer_dead(endpoint, writer, 0.0))
    pair.cancel(stream)
    await stream.end()


async def test_an_unsettled_write_is_fenced_and_frees_nothing_before(
    copies: CopyGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(ProcessHandle, "kill", lambda handle: killed.append(handle.pid))
    copies.close()
    async with deployed(protocol=msgspec.structs.replace(PROTOCOL, write_seconds_max=0.05)) as pair:
        stream = pair.submit(prompt_of(10), 6)
        await until(lambda: killed, "the fence")
        for _ in range(5):
            await pair.gateway.inspect(pair.decode.incarnation)
        assert in_use(pair.decode.pages, OwnerKind.LEASE) == 3
        assert in_use(pair.prefill.pages, OwnerKind.ROOM) == 3
        assert len(killed) == 1
        copies.open()
        await until(lambda: not pair.prefill.scheduler.jobs, "the end of its engine instance")
        assert in_use(pair.decode.pages, OwnerKind.LEASE) == 3, "only death is a proof"
        writer, endpoint = pair.prefill.incarnation, pair.prefill.handover.endpoint
        pair.decode.handover.apply(pair.decode.table.writer_dead(endpoint, writer, 0.0))
        pair.cancel(stream)
        await stream.end()


@pytest.mark.parametrize("tokens_before", [0, 1, 3])
async def test_deadline(pair: Pair, tokens_before: int, copies: CopyGate) -> None:
    """Wherever it strikes: before the first token, in the transfer, while decoding."""
    gates = [pair.prefill_executor.gate, pair.decode_executor.gate]
    if tokens_before == 0:
        gates[0].clear()
    elif tokens_before == 1:
        copies.close()
    else:
        gates[1].clear()
        for _ in range(tokens_before - 1):  # the first one is prefill's
            gates[1].step()
    sampling = Sampling(max_tokens=80, temperature=0.0)
    stream = pair.gateway.submit(pair.decode.incarnation, prompt_of(10), sampling, seconds_max=0.3)
    if tokens_before == 3:
        await stream.reach(3)
    request = stream.request
    await until(
        lambda: stream.finished or ((r := pair.decode.scheduler.requests.get(request)) and r.ended),
        "the deadline",
    )
    for gate in gates:
        gate.set()
    finished = await stream.end()
    assert finished.reason is FinishReason.DEADLINE
    copies.open()
    await pair.deployment.quiet()
    await pair.serves()


async def test_no_prefill_worker() -> None:
    """Those who wait are told after the silence; one that comes then is used."""
    protocol = msgspec.structs.replace(PROTOCOL, unpaired_seconds_max=0.3)
    deployment = Deployment(GatewayPeer())
    decode = deployment.add_decode(StandInExecutor(64), deployment.config(protocol))
    await deployment.paired()
    sampling = Sampling(max_tokens=2, temperature=0.0)
    stream = deployment.gateway.submit(decode.incarnation, prompt_of(5), sampling)
    assert (await stream.end()).reason is FinishReason.UNAVAILABLE
    deployment.add_prefill(StandInExecutor(64), deployment.config(PROTOCOL))
    await deployment.paired()
    stream = deployment.gateway.submit(decode.incarnation, prompt_of(5), sampling)
    assert (await stream.end()).reason is FinishReason.LENGTH
    await deployment.quiet()
    await deployment.close()


async def test_a_gateway_that_is_lost_takes_its_requests_along() -> None:
    protocol = msgspec.structs.replace(PROTOCOL, hello_interval_seconds=0.05)
    async with deployed(protocol=protocol) as pair:
        pair.decode_executor.gate.clear()
        pair.prefill_executor.gate.clear()
        prefilling = pair.submit(prompt_of(10), 20)
        await until(lambda: pair.prefill_executor.is_running, "prefill")
        # Another life of the gateway answers in its place.
        pair.gateway.incarnation = new_incarnation()
        await until(lambda: not pair.decode.scheduler.requests, "the end of its requests")
        pair.prefill_executor.gate.set()
        pair.decode_executor.gate.set()
        assert prefilling.finished is None, "there is nobody to tell"
        await pair.deployment.quiet()
        await pair.serves()


async def test_a_gateway_that_falls_silent() -> None:
    deployment = Deployment(GatewayPeer())
    protocol = msgspec.structs.replace(PROTOCOL, silence_seconds=0.4, tick_late_seconds=0.1)
    deployment.add_prefill(StandInExecutor(64), deployment.config(PROTOCOL))
    decode = deployment.add_decode(StandInExecutor(64), deployment.config(protocol))
    await deployment.paired()
    decode.executor.gate.clear()  # type: ignore[attr-defined]
    gateway = deployment.gateway
    stream = gateway.submit(decode.incarnation, prompt_of(5), Sampling(max_tokens=9))
    await stream.reach(1)
    gateway.is_mute = True
    await until(lambda: decode.links.gateways()[0]["gateway"] is None, "the loss")
    decode.executor.gate.set()  # type: ignore[attr-defined]
    await until(lambda: not decode.scheduler.requests, "the end of its requests")
    gateway.is_mute = False
    await deployment.paired()
    stream = gateway.submit(decode.incarnation, prompt_of(5), Sampling(max_tokens=2))
    assert (await stream.end()).reason is FinishReason.LENGTH
    await deployment.quiet()
    await deployment.close()


# Malformed and foreign


BAD_FRAMES = [b"", b"\x00", b"\x01", b"\x01\xc1", b"\x02\x80", b"\x01" + b"\x91" * 5000, b"x" * 70]


async def test_malformed_frames_are_counted_and_harm_nobody(pair: Pair) -> None:
    stranger = DealerChannel(
        pair.prefill.handover.endpoint, b"stranger", lambda frame: None, FRAME_BYTES
    )
    await until(lambda: stranger.send(b""), "a connection")
    for frame in BAD_FRAMES[1:]:
        assert stranger.send(frame)
        assert pair.gateway.send(pair.decode.incarnation, frame)
        assert pair.gateway.send(pair.prefill.incarnation, frame)
    await until(lambda: pair.prefill.handover.rejected.total() == len(BAD_FRAMES), "all of them")
    await pair.serves()
    for worker in (pair.decode, pair.prefill):
        await pair.gateway.inspect(worker.incarnation)  # which comes after them
        assert worker.links.rejected.total() == len(BAD_FRAMES) - 1
    stranger.close()


async def test_malformed_frames_to_a_decode_worker(pair: Pair) -> None:
    (peer,) = pair.prefill.table.peers.known
    for frame in BAD_FRAMES:
        assert pair.prefill.handover._channel.send(b"w" + peer.to_bytes(8, "big"), frame)
    await until(lambda: pair.decode.handover.rejected.total() == len(BAD_FRAMES), "all of them")
    await pair.serves()


async def test_requests_for_others_change_nothing(pair: Pair) -> None:
    sampling = Sampling(max_tokens=2)
    stream = pair.submit(prompt_of(5), 2)
    await stream.end()
    other_life = Submit(
        stream.request, Incarnation(77), (1, 2), (), sampling, seconds_max=9.0, prefill_endpoints=()
    )
    other_gateway = msgspec.structs.replace(
        other_life,
        worker=pair.decode.incarnation,
        request=msgspec.structs.replace(stream.request, gateway=Incarnation(88)),
    )
    for_decode = msgspec.structs.replace(other_life, worker=pair.prefill.incarnation)
    pair.gateway.send(pair.decode.incarnation, encode(other_life))
    pair.gateway.send(pair.decode.incarnation, encode(other_gateway))
    pair.gateway.send(pair.prefill.incarnation, encode(for_decode))
    await pair.serves()
    for worker in (pair.decode, pair.prefill):
        await pair.gateway.inspect(worker.incarnation)  # which comes after them
    assert pair.decode.links.stale == {"other_incarnation": 1, "other_gateway": 1}
    assert pair.prefill.table.stale["not_for_prefill"] == 1
    assert stream.finishes == 1


async def test_odd_sampling(pair: Pair) -> None:
    sampling = Sampling(max_tokens=2**62, temperature=0.0)
    stream = pair.gateway.submit(pair.decode.incarnation, prompt_of(90), sampling)
    assert (await stream.end()).reason is FinishReason.LENGTH
    await pair.serves()


@pytest.mark.parametrize("seconds", [0.0, -1.0])
async def test_odd_deadlines(pair: Pair, seconds: float) -> None:
    sampling = Sampling(max_tokens=3, temperature=0.0)
    stream = pair.gateway.submit(
        pair.decode.incarnation, prompt_of(5), sampling, seconds_max=seconds
    )
    finished = await stream.end()
    assert finished.reason in (FinishReason.LENGTH, FinishReason.DEADLINE)
    await pair.serves()


async def test_requests_that_no_gateway_sends_do_not_decode(pair: Pair) -> None:
    sampling = Sampling(max_tokens=3)
    submit = Submit(
        RequestId(Incarnation(99), 1, 1), pair.decode.incarnation, (1, 2), (), sampling,
        seconds_max=9.0, prefill_endpoints=(),
    )  # fmt: skip
    odd = [
        msgspec.structs.replace(submit, **change)
        for change in (
            {"token_ids": (1, -1)},
            {"seconds_max": float("inf")},
            {"seconds_max": float("nan")},
            {"sampling": msgspec.structs.replace(sampling, max_tokens=-5)},
            {"sampling": msgspec.structs.replace(sampling, seed=-1)},
        )
    ]
    for message in odd:
        pair.gateway.send(pair.decode.incarnation, encode(message))
    await pair.serves()
    assert pair.decode.links.rejected.total() == len(odd)


async def test_different_models_are_never_paired() -> None:
    deployment = Deployment(GatewayPeer())
    deployment.add_prefill(
        StandInExecutor(8, identity_=identity("theirs")), deployment.config(PROTOCOL)
    )
    decode = deployment.add_decode(
        StandInExecutor(8, identity_=identity("ours")),
        deployment.config(msgspec.structs.replace(PROTOCOL, unpaired_seconds_max=0.3)),
    )
    gateway = deployment.gateway

    def refused() -> tuple[str, ...]:
        register = gateway.registers.get(decode.incarnation)
        return register.refused if register else ()

    await until(refused, "the refusal")
    (why,) = refused()
    assert "ours" in why
    assert "theirs" in why
    assert not decode.table.usable_endpoints()
    stream = gateway.submit(decode.incarnation, prompt_of(5), Sampling(max_tokens=2))
    assert (await stream.end()).reason is FinishReason.UNAVAILABLE
    await deployment.close()


async def test_another_page_size_is_refused_by_name() -> None:
    deployment = Deployment(GatewayPeer())
    layout = msgspec.structs.replace(LAYOUT, page_size=8)
    deployment.add_prefill(StandInExecutor(8, layout), deployment.config(PROTOCOL))
    decode = deployment.add_decode(StandInExecutor(8), deployment.config(PROTOCOL))
    await until(decode.view.refused_pairs, "the refusal")
    assert "page_size" in decode.view.refused_pairs()[0]
    await deployment.close()


# Leaving


async def test_a_decode_worker_leaves(pair: Pair) -> None:
    """What runs is finished, what waits and what comes goes elsewhere at once."""
    pair.decode_executor.gate.clear()
    running = pair.submit(prompt_of(5), 6)
    await until(lambda: pair.decode_executor.is_running, "a step")
    pair.decode.loop._leave()
    await until(lambda: pair.gateway.registers[pair.decode.incarnation].draining, "the word")
    late = pair.submit(prompt_of(5), 6)
    assert (await late.end()).reason is FinishReason.UNAVAILABLE
    assert running.finished is None
    pair.decode_executor.gate.set()
    assert (await running.end()).reason is FinishReason.LENGTH
    assert running.tokens == output_of(prompt_of(5), 6)
    assert await pair.deployment.exit_code(pair.decode) is ExitCode.STOPPED


async def test_the_last_words_of_a_decode_worker_arrive() -> None:
    """It ends in the same step in which it tells those who wait."""
    scheduler = msgspec.structs.replace(SCHEDULER, max_num_seqs=1)
    deployment = Deployment(GatewayPeer())
    decode = deployment.add_decode(StandInExecutor(8), deployment.config(PROTOCOL, scheduler))
    await deployment.paired()
    streams = [
        deployment.gateway.submit(decode.incarnation, prompt_of(5), Sampling(max_tokens=2))
        for _ in range(20)
    ]
    await until(lambda: decode.scheduler.queued == 20, "the queue")
    decode.loop._leave()
    assert await deployment.exit_code(decode) is ExitCode.STOPPED
    for stream in streams:
        assert (await stream.end()).reason is FinishReason.UNAVAILABLE
    await deployment.close()


async def test_a_request_that_must_move_leaves_a_leaving_worker_at_once(pair: Pair) -> None:
    """It would wait for a room that is never opened."""
    pair.prefill_executor.gate.clear()
    stream = pair.submit(prompt_of(5), 6)
    await until(lambda: pair.prefill_executor.is_running, "prefill")
    pair.decode.loop._leave()
    pair.prefill_executor.failures = 1
    pair.prefill_executor.gate.set()
    assert (await stream.end()).reason is FinishReason.UNAVAILABLE
    assert await pair.deployment.exit_code(pair.decode) is ExitCode.STOPPED


async def test_a_decode_worker_that_runs_out_of_time() -> None:
    deployment = Deployment(GatewayPeer())
    deployment.add_prefill(StandInExecutor(64), deployment.config())
    executor = StandInExecutor(64)
    decode = deployment.add_decode(executor, deployment.config(shutdown_timeout=0.05))
    await deployment.paired()
    executor.gate.clear()
    stream = deployment.gateway.submit(decode.incarnation, prompt_of(5), Sampling(max_tokens=9))
    await until(lambda: executor.is_running, "a step")
    decode.loop._leave()
    assert (await stream.end()).reason is FinishReason.UNAVAILABLE
    assert await deployment.exit_code(decode) is ExitCode.STOPPED
    await deployment.close()


async def test_its_time_is_up_in_the_turn_in_which_a_step_ends(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests have been told; the step has nobody to tell, and that breaks nothing."""
    step: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
    rows: list[object] = []

    async def wait(planned: Sequence[object]) -> StepResult:
        rows.extend(planned)
        return await step

    monkeypatch.setattr(pair.decode_executor, "step", wait)
    stream = pair.submit(prompt_of(5), 6)
    await until(lambda: rows, "a step")
    pair.decode.loop._leave()
    assert pair.decode._leave_by is not None
    step.set_result(StepResult([7], 0.0, [None], [()]))
    pair.decode._leave_when_done(pair.decode._leave_by + 1)
    assert await pair.deployment.exit_code(pair.decode) is ExitCode.STOPPED
    assert (await stream.end()).reason is FinishReason.UNAVAILABLE


async def test_a_prefill_worker_leaves(pair: Pair) -> None:
    pair.prefill_executor.gate.clear()
    running = pair.submit(prompt_of(20), 6)
    await until(lambda: pair.prefill_executor.is_running, "prefill")
    pair.prefill.loop._leave()
    await until(lambda: pair.gateway.registers[pair.prefill.incarnation].draining, "the word")
    await until(lambda: not pair.decode.table.usable_endpoints(), "its refusal")
    pair.prefill_executor.gate.set()
    assert (await running.end()).reason is FinishReason.LENGTH
    assert running.tokens == output_of(prompt_of(20), 6)
    assert await pair.deployment.exit_code(pair.prefill) is ExitCode.STOPPED


async def test_a_prefill_worker_stays_until_its_last_word_was_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is unread when the connection ends is lost."""
    monkeypatch.setattr(prefill_worker, "LAST_WORD_SECONDS", math.inf)
    pair.prefill_executor.gate.clear()
    running = pair.submit(prompt_of(20), 6)
    await until(lambda: pair.prefill_executor.is_running, "prefill")
    pair.prefill.loop._leave()
    pair.prefill_executor.gate.set()
    assert (await running.end()).reason is FinishReason.LENGTH
    await until(lambda: not pair.prefill.table.rooms, "the end of its room")
    assert pair.prefill._leave_by is not None
    pair.prefill._leave_when_done(pair.prefill._leave_by, time.monotonic())
    assert not pair.prefill.loop.is_ending
    monkeypatch.setattr(prefill_worker, "LAST_WORD_SECONDS", 0.0)
    assert await pair.deployment.exit_code(pair.prefill) is ExitCode.STOPPED


async def test_a_prefill_worker_that_runs_out_of_time() -> None:
    deployment = Deployment(GatewayPeer())
    slow = StandInExecutor(64)
    leaving = deployment.add_prefill(slow, deployment.config(shutdown_timeout=0.05))
    decode = deployment.add_decode(StandInExecutor(64), deployment.config())
    await deployment.paired()
    slow.gate.clear()
    stream = deployment.gateway.submit(
        decode.incarnation, prompt_of(20), Sampling(max_tokens=6, temperature=0.0)
    )
    await until(lambda: slow.is_running, "prefill")
    deployment.add_prefill(StandInExecutor(64), deployment.config())
    leaving.loop._leave()
    await until(lambda: leaving.table.rooms and _reasons(leaving) == {Reason.SHUTDOWN}, "the end")
    slow.gate.set()
    assert (await stream.end()).reason is FinishReason.LENGTH
    assert stream.tokens == output_of(prompt_of(20), 6)
    assert await deployment.exit_code(leaving) is ExitCode.STOPPED
    await deployment.close()


def _reasons(worker: PrefillWorker) -> set[Reason | None]:
    return {room.reason for room in worker.table.rooms.values()}


async def test_told_twice_to_stop(pair: Pair) -> None:
    pair.decode_executor.gate.clear()
    stream = pair.submit(prompt_of(5), 6)
    await stream.reach(1)
    pair.decode.loop._leave()
    pair.decode.loop._leave()
    assert await pair.deployment.exit_code(pair.decode) is ExitCode.STOPPED
    pair.decode_executor.gate.set()


async def test_what_breaks_ends_the_worker(pair: Pair) -> None:
    """And says so with its exit code. Nobody goes on with a broken invariant."""

    async def broken() -> None:
        raise AssertionError("broken on purpose")

    pair.prefill.loop.start(broken(), "broken")
    assert await pair.deployment.exit_code(pair.prefill) is ExitCode.BROKEN
    pair.deployment.forgive(pair.prefill)
