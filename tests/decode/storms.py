"""Aborts by state: requests are held in one, cancelled there, and counted where they really were
when the worker heard of it."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

import msgspec

from pdrt.config import SchedulerConfig
from pdrt.ids import RequestId
from pdrt.protocol.gateway_messages import Cancel, FinishReason
from pdrt.protocol.rooms import RoomState
from pdrt.scheduling.decode_request import DecodeRequest, RequestState
from tests.decode.deployment import SCHEDULER, Pair, Stream, prompt_of, until
from tests.descriptors import open_descriptors
from tests.prefill.executor import StandInExecutor, output_of
from tests.transfer.copies import CopyGate

STORM: SchedulerConfig = msgspec.structs.replace(
    SCHEDULER, max_num_seqs=16, max_num_batched_tokens=16, stream_tokens_max=4
)
PAGES = 64
"""On either side: too few for a batch of long prompts."""
OUTPUT_TOKENS = 6


class Moment(Enum):
    """Where a request is between its submission and its end."""

    QUEUED = "queued for pages of the decode worker"
    HANDSHAKING = "granted, and the prefill worker has not read it"
    ROOM_QUEUED = "a room that waits for its turn"
    PREFILLING = "prefilling chunk k"
    TRANSFERRING = "computed, its pages under way"
    LANDED = "its pages have landed, and no step has read them"
    DECODING = "in a step"
    UNREAD = "paused, as its client has stopped reading"


def moment_of(pair: Pair, name: RequestId) -> Moment | None:
    """None: in none of these, or over."""
    request = pair.decode.scheduler.requests.get(name)
    if request is None:
        return None
    match request.state:
        case RequestState.QUEUED:
            return Moment.QUEUED
        case RequestState.PREFILLING:
            return _of_room(pair, request)
        case RequestState.RUNNING:
            return _of_sequence(request)


def _of_room(pair: Pair, request: DecodeRequest) -> Moment | None:
    assert request.room is not None
    room = pair.prefill.table.rooms.get(request.room)
    if room is None:
        # Before it was opened, or its end is on the way.
        return Moment.LANDED if "prefill" in request.timings else Moment.HANDSHAKING
    job = pair.prefill.scheduler.jobs[request.room]
    if room.state is not RoomState.OPEN:
        return None
    if job.computed_at is not None:
        return Moment.TRANSFERRING
    return Moment.ROOM_QUEUED if job.started_at is None else Moment.PREFILLING


def _of_sequence(request: DecodeRequest) -> Moment | None:
    if request.is_in_step:
        return Moment.DECODING
    if request.output_tokens - request.tokens_taken >= STORM.stream_tokens_max:
        return Moment.UNREAD
    return Moment.LANDED if request.output_tokens == 1 else None


BATCH = dict.fromkeys(Moment, 16) | {Moment.PREFILLING: 5}
"""Clients at once. Few are in the middle of a prompt at the same time."""


class Holdings(msgspec.Struct, frozen=True):
    """What this process has of everything that could leak."""

    fds: int
    threads: int
    blocks: int
    """Python's allocated blocks of memory. A request that is kept keeps dozens."""


def holdings() -> Holdings:
    return Holdings(len(open_descriptors()), threading.active_count(), sys.getallocatedblocks())


class Storm:
    """Batches of clients that leave, each held in one moment first."""

    def __init__(self, pair: Pair, copies: CopyGate, dice: random.Random) -> None:
        self.hits: Counter[Moment] = Counter()
        """Cancels by where the request was when its decode worker took them."""
        self.chunks: Counter[int] = Counter()
        """Of those in PREFILLING: chunks that were done."""
        self.probes = 0
        """Requests between these that nobody cancelled: answered, and right."""
        self._pair = pair
        self._copies = copies
        self._dice = dice
        self._salt = 0
        self._taken = 0
        self._grants_held: list[tuple[bytes, bytes]] | None = None
        self._watch_cancels()
        self._watch_frames()

    def _watch_cancels(self) -> None:
        links = self._pair.decode.links
        pass_on = links.on_request

        def on_request(request: object) -> None:
            if isinstance(request, Cancel):
                self._count(request.request)
            pass_on(request)  # type: ignore[arg-type]

        links.on_request = on_request

    def _count(self, name: RequestId) -> None:
        self._taken += 1
        moment = moment_of(self._pair, name)
        if moment is None:
            return
        self.hits[moment] += 1
        if moment is Moment.PREFILLING:
            room = self._pair.decode.scheduler.requests[name].room
            assert room is not None
            computed = self._pair.prefill.scheduler.jobs[room].computed
            self.chunks[computed // STORM.max_num_batched_tokens] += 1

    def _watch_frames(self) -> None:
        """What decode says to prefill can be held back, in order."""
        channel = self._pair.prefill.handover._channel
        self._pass_on = channel._on_frame

        def on_frame(peer: bytes, frame: bytes) -> None:
            if self._grants_held is None:
                self._pass_on(peer, frame)
            else:
                self._grants_held.append((peer, frame))

        channel._on_frame = on_frame

    # Holding requests in a moment

    @contextmanager
    def _hold(self, moment: Moment) -> Iterator[None]:
        """Nobody gets beyond it."""
        prefill, decode = self._pair.prefill_executor.gate, self._pair.decode_executor.gate
        match moment:
            case Moment.QUEUED | Moment.ROOM_QUEUED | Moment.PREFILLING:
                prefill.clear()
            case Moment.HANDSHAKING:
                self._grants_held = []
            case Moment.TRANSFERRING:
                self._copies.close()
            case Moment.LANDED | Moment.DECODING:
                decode.clear()
            case Moment.UNREAD:
                pass
        try:
            yield
        finally:
            held, self._grants_held = self._grants_held or [], None
            for peer, frame in held:
                self._pass_on(peer, frame)
            self._copies.open()
            prefill.set()
            decode.set()

    async def batch(self, moment: Moment) -> None:
        """Clients of whom those that come to be in `moment` leave, and the others are answered."""
        with self._hold(moment):
            streams = []
            if moment is Moment.LANDED:
                streams.append(await self._begin_a_step())
            streams += [self._submit(moment) for _ in range(BATCH[moment])]
            if moment is Moment.PREFILLING:
                await some_chunks(self._pair.prefill_executor, self._dice)
            if moment is Moment.DECODING:
                await self._join_a_step(streams)
            there = await self._wait_for(moment, streams)
            await self._cancel(there)
        await self._read_all(streams)
        for stream in streams:
            self._judge(stream, stream in there)
        self.probes += len(streams) - len(there)
        await self._settle()

    def _submit(self, moment: Moment) -> Stream:
        self._salt += 1
        is_long = moment in (Moment.PREFILLING, Moment.QUEUED)
        length = self._dice.randint(40, 60) if is_long else self._dice.randint(2, 14)
        prompt = prompt_of(length, self._salt)
        return self._pair.submit(prompt, OUTPUT_TOKENS)

    async def _begin_a_step(self) -> Stream:
        """Whoever lands from now on has to wait for the next one."""
        stream = self._submit(Moment.LANDED)
        await until(lambda: self._pair.decode_executor.is_running, "a step")
        return stream

    async def _join_a_step(self, streams: list[Stream]) -> None:
        """All that have landed take part in the next one."""
        executor = self._pair.decode_executor
        names = [stream.request for stream in streams]
        requests = self._pair.decode.scheduler.requests
        await until(
            lambda: (
                all(n in requests and requests[n].output_tokens for n in names)
                and not self._pair.decode.table.leases
            ),
            "the landing of all",
        )
        count = len(executor.steps)
        executor.gate.step()
        await until(lambda: len(executor.steps) > count and executor.is_running, "a step of all")

    async def _wait_for(self, moment: Moment, streams: list[Stream]) -> list[Stream]:
        """Those who are there, once somebody is and nobody is about to be."""

        def there() -> list[Stream]:
            return [s for s in streams if moment_of(self._pair, s.request) is moment]

        await until(there, f"somebody who is {moment.value}")
        while True:
            found = there()
            await asyncio.sleep(0.004)
            if len(there()) == len(found):
                return there()

    async def _cancel(self, streams: list[Stream]) -> None:
        """In any order, at any moment; until the worker has taken them all."""
        before, wanted = self._taken, len(streams)
        for stream in self._dice.sample(streams, wanted):
            self._pair.cancel(stream)
            if self._dice.random() < 0.3:
                await asyncio.sleep(0.002 * self._dice.random())
        await until(lambda: self._taken - before >= wanted, "the cancels to be taken")

    async def _read_all(self, streams: list[Stream]) -> None:
        """Clients read on until everybody has an end."""
        told: Counter[Stream] = Counter()

        def is_over() -> bool:
            for stream in streams:
                taken = len(stream.tokens)
                if stream.finished is None and taken > told[stream]:
                    told[stream] = taken
                    self._pair.gateway.credit(self._pair.decode.incarnation, stream, taken)
            return all(stream.finished for stream in streams)

        await until(is_over, "an end of every request")

    def _judge(self, stream: Stream, has_left: bool) -> None:
        assert stream.finished is not None
        prompt = stream.submit.token_ids
        assert stream.tokens == output_of(prompt, len(stream.tokens))
        if has_left:
            assert stream.finished.reason is FinishReason.CANCELLED, stream.finished
        else:
            assert stream.finished.reason is FinishReason.LENGTH, stream.finished
            assert len(stream.tokens) == OUTPUT_TOKENS

    async def _settle(self) -> None:
        """Both pools are whole, all invariants hold; then the test itself lets go of everything."""
        pair = self._pair
        await pair.deployment.quiet()
        for worker in (pair.decode, pair.prefill):
            assert not (await pair.gateway.inspect(worker.incarnation)).broken
        pair.gateway.streams.clear()
        pair.gateway.reports.clear()
        pair.prefill_executor.steps.clear()
        pair.decode_executor.steps.clear()

    async def until_hit(self, moments: Callable[[], list[Moment]]) -> None:
        """Batches of what is still called for."""
        while wanted := moments():
            await self.batch(self._dice.choice(wanted))


async def some_chunks(executor: StandInExecutor, dice: random.Random) -> None:
    """Let some steps pass through its closed gate, none of them further than its middle."""
    for _ in range(dice.randint(0, 2)):
        await until(lambda: executor.is_running, "a chunk")
        count = len(executor.steps)
        executor.gate.step()
        await until(lambda count=count: len(executor.steps) > count, "the next chunk")  # type: ignore[misc]
