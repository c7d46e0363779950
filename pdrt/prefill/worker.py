"""`pdrt prefill`: computes prompts' KV and pushes it into decode workers' pages.

The one place where the prefill side's pure parts meet: room table, page table and scheduler.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import uvloop

from pdrt.config import WorkerConfig
from pdrt.errors import DeviceLost, RequestRefused, Unavailable
from pdrt.ids import RoomId, new_incarnation, short
from pdrt.kv.pages import Owner, OwnerKind, PageTable
from pdrt.kv.prefix import PrefixCache
from pdrt.model.batch import StepResult
from pdrt.model.collectives import RankPlace
from pdrt.model.executor import Executor
from pdrt.model.steady import steady
from pdrt.observe.metrics import Metrics
from pdrt.observe.tracing import Tracer
from pdrt.observe.worker_http import WorkerHttp
from pdrt.prefill.ends import RoomEnds
from pdrt.prefill.handover import Handover, PrefillRanks, RoomEffect
from pdrt.prefill.judge import Limits, refusal
from pdrt.prefill.prompts import Prompts, grammar_of
from pdrt.prefill.rank import FromPrefillRank, PrefillRank, prefill_parts
from pdrt.prefill.view import PrefillView
from pdrt.protocol.clock import TICK_SECONDS
from pdrt.protocol.effects import CloseRoom, OpenRoom, ReleaseSource
from pdrt.protocol.gateway_messages import Drain, Inspect
from pdrt.protocol.invariants import check_prefill
from pdrt.protocol.messages import Drained, Fingerprint, FirstTokenData, Grant, Reason
from pdrt.protocol.room_writer import RankEnd
from pdrt.protocol.rooms import PrefillWorkerInfo, RoomTable
from pdrt.sampling import Grammar
from pdrt.scheduling.prefill import PrefillScheduler
from pdrt.scheduling.prefill_job import Chunk
from pdrt.transfer.cluster_key import read_key
from pdrt.transfer.gateway_link import GatewayLinks, Request
from pdrt.transfer.liveness import Liveness
from pdrt.transfer.processes import this_process
from pdrt.transfer.rank_check import check_own
from pdrt.transfer.rank_children import RankChild, watched
from pdrt.transfer.rank_group import RankGroup
from pdrt.transfer.rank_messages import Held, HeldEngine, HeldRoom
from pdrt.transfer.room_task import ForwardEnded, ForwardStarted, PagesFinished
from pdrt.transfer.self_watch import SelfWatch
from pdrt.transfer.worker_loop import CHECK_SECONDS, Announce, ExitCode, WorkerLoop, exit_now

log = logging.getLogger(__name__)

CPU_TOKENS_EFFICIENT = 128
"""A step of so many tokens is bound by arithmetic on a CPU: a token of it costs within 11 % of one
of a step of 512 (measured: SmolLM2-135M's linear layers, float32, one AVX2 core). A GPU is far from
that at any budget."""
DRAIN_SECONDS_MAX = 5.0
"""What rooms may take to drain at exit, after their time to finish is over."""
LAST_WORD_SECONDS = 0.2
"""A worker that leaves stays so long after the end of its last room: libzmq drops what a decode
worker has not read when the connection ends, and that would then wait for this one's silence."""


def run(
    config: WorkerConfig,
    announce: Announce,
    children: Sequence[RankChild] = (),
    place: RankPlace | None = None,
) -> NoReturn:
    """Load the model and serve until told to stop; ends the process with an `ExitCode`.

    Args:
        children: the worker's other ranks, which load their parts meanwhile.
        place: rank 0's, where there are others.

    Raises:
        PdrtError: the configuration or the model cannot be used; says what to do.
    """
    with watched(children):
        executor = Executor.load(config.model, config.device, log.info, place)
    steady(executor.pool, config.device)
    exit_now(uvloop.run(_serve(config, announce, executor, children)))


async def _serve(
    config: WorkerConfig, announce: Announce, executor: Executor, children: Sequence[RankChild]
) -> ExitCode:
    worker = PrefillWorker(config, executor, children)
    announce(worker.facts())
    return await worker.run()


class PrefillWorker:
    """All state of one prefill worker. Everything runs on the loop but forwards and copies."""

    def __init__(
        self, config: WorkerConfig, executor: Executor, children: Sequence[RankChild] = ()
    ) -> None:
        """`children`: the processes of the other ranks, which have loaded their part by now."""
        now = time.monotonic()
        self.config = config
        self.incarnation = new_incarnation()
        self.executor = executor
        self.pages = PageTable(executor.pages)
        self.view = PrefillView(self)
        self.metrics = Metrics("prefill", short(self.incarnation))
        self.tracer = Tracer(config.observe.otlp_endpoint, "prefill", short(self.incarnation))
        self._ends = RoomEnds(self.metrics, self.tracer)
        identity = executor.identity
        is_checked = config.model.kv_checksum
        self.fingerprint = Fingerprint(
            identity.name, identity.digest, executor.layout, kv_checksum=is_checked
        )
        limits = config.scheduler
        self.cache = PrefixCache(self.pages, limits.enable_prefix_caching)
        is_cpu = executor.pool.tensor.device.type == "cpu"
        self.scheduler = PrefillScheduler(
            executor.layout,
            self.cache,
            limits.max_num_batched_tokens,
            limits.max_num_seqs,
            tokens_efficient=CPU_TOKENS_EFFICIENT if is_cpu else None,
        )
        self._prompts = Prompts()
        self.loop = WorkerLoop(self._tick, self._leave)
        self.ranks: PrefillRanks = RankGroup(children, FromPrefillRank, self.loop)
        parts = prefill_parts(0, 1 + len(children), config, executor.layout, executor.pool)
        self.rank = PrefillRank(
            parts, config.protocol.inbox_max, self.loop.start, self.ranks.answer
        )
        self.ranks.handle, self.ranks.report = self.rank.handle, self.rank.report
        self.ranks.believed = self._held_by
        if children:
            executor.tell_ranks = self.ranks.step
        processes = (this_process(), *(child.named for child in children))
        info = PrefillWorkerInfo(
            self.incarnation, self.fingerprint, processes, tuple(parts.senders)
        )
        self.table = RoomTable(info, config.protocol, now)
        late = config.protocol.tick_late_seconds
        self.liveness = Liveness(limits.stall_seconds_max, late, now)
        self._watch = SelfWatch(self.liveness, self.loop, self.view.complaints)
        self.handover = Handover(self.table, self.ranks, config, self.loop)
        grant_limits = Limits(
            identity, executor.layout, executor.pages, config.protocol.frame_bytes_max
        )
        self.handover.judge = lambda grant: refusal(grant, grant_limits)
        self.handover.on_room = self._apply_room
        self.handover.on_rank_end = self._rank_ended
        self.handover.on_end = self._room_ended
        self.links = GatewayLinks(
            config.gateway,
            self.incarnation,
            config.protocol,
            self.view.register,
            read_key(config.security),
        )
        self.links.on_request = self._on_request
        self.http = WorkerHttp(
            config.host,
            config.metrics_port,
            self.view.render,
            self.view.reasons,
            self.view.status,
        )
        self._work = asyncio.Event()
        self._leave_by: float | None = None
        self._said_at = -math.inf  # the end of a room, last
        self._checked_at = now

    @property
    def is_leaving(self) -> bool:
        """It takes nothing new and finishes what it has."""
        return self._leave_by is not None

    def facts(self) -> dict[str, Any]:
        """What is announced once this worker is up."""
        return {
            "role": "prefill",
            "incarnation": short(self.incarnation),
            "endpoint": self.handover.endpoint,
            "metrics": self.http.url,
            "pages": self.pages.total,
        }

    async def run(self) -> ExitCode:
        """Serve until told to stop."""
        try:
            return await self.loop.run(compute=self._compute(), http=self.http.run())
        finally:
            self.handover.close()
            self.rank.close()
            self.ranks.close()
            self.links.close()
            self.tracer.close()

    # Rooms

    def _apply_room(self, effect: RoomEffect) -> None:
        match effect:
            case OpenRoom():
                self._open_room(effect.grant)
            case CloseRoom():
                self.scheduler.stop(effect.room)
            case ReleaseSource():
                self._release_source(effect.room)

    def _open_room(self, grant: Grant) -> None:
        grammar = grammar_of(grant)
        self.scheduler.add(grant, time.monotonic(), is_blocked=grammar is not None)
        if grammar is not None:
            self.loop.start(self._compile(grant.room, grammar), f"grammar of room {grant.room}")
        self._work.set()

    async def _compile(self, room: RoomId, grammar: Grammar) -> None:
        """Meanwhile all of the prompt is computed but its last token."""
        try:
            matcher = await self.executor.grammars.matcher(
                grammar, lambda: room in self.scheduler.jobs
            )
        except RequestRefused as refused:
            self.handover.apply(self.table.end_room(room, Reason.REJECTED, str(refused)))
            return
        except Unavailable as error:
            self.handover.apply(self.table.end_room(room, Reason.TASK_FAILED, str(error)))
            return
        if room in self.scheduler.jobs:
            self._prompts.set_matcher(room, matcher)
            self.scheduler.unblock(room)
            self._work.set()

    def _release_source(self, room: RoomId) -> None:
        """The one place where source pages leave their room, its own and cached ones: nobody
        writes from them any more."""
        pages = self.scheduler.forget(room)
        self.cache.release(pages, Owner(OwnerKind.ROOM, room))
        self._prompts.forget(room)
        # Somebody may have been waiting for them.
        self._work.set()

    def _rank_ended(self, rank: int, engine: str, end: RankEnd) -> None:
        self.metrics.count_transfer(engine, end.bytes_written, rank)

    def _room_ended(self, drained: Drained) -> None:
        self._said_at = time.monotonic()
        self.metrics.count_request(drained.outcome.value)
        if drained.reason is None:
            self.liveness.moved()
        else:
            self.metrics.count_room_end(drained.reason.value)
        if job := self.scheduler.jobs.get(drained.room):
            self._ends.ended(job, drained, time.monotonic())

    # Steps

    async def _compute(self) -> None:
        while not self.loop.is_ending:
            chunks = self.scheduler.plan(time.monotonic())
            if chunks:
                await self._step(chunks)
            else:
                self._work.clear()
                await self._work.wait()

    async def _step(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self._chunk_started(chunk)
        rows = [self._prompts.row(self.scheduler.jobs[chunk.room], chunk) for chunk in chunks]
        try:
            result = await self.executor.step(rows)
        except (AssertionError, DeviceLost):
            raise  # our own bug, or a broken GPU: the worker ends
        except Exception as error:
            log.exception("prefill step failed")
            if self.ranks.has_others:
                await self.ranks.forward_failed(repr(error))
                return
            self.liveness.forward_failed(repr(error), time.monotonic())
            self._step_failed(chunks, repr(error))
            return
        self.liveness.forward_ended()
        tokens = sum(len(row.token_ids) for row in rows)
        self.metrics.observe_step(result.seconds, len(rows), tokens)
        self.metrics.count_prompt_tokens(tokens)
        for index, chunk in enumerate(chunks):
            self._chunk_finished(chunk, result, index)

    def _chunk_started(self, chunk: Chunk) -> None:
        """Pages that were found in the cache are sent while the rest is computed."""
        job = self.scheduler.jobs[chunk.room]
        if job.cached:
            cached = chunk.start // self.executor.layout.page_size
            self.handover.post(chunk.room, PagesFinished(job.pages, cached, is_last=False))
        self.handover.post(chunk.room, ForwardStarted())

    def _chunk_finished(self, chunk: Chunk, result: StepResult, index: int) -> None:
        """First the token, so that the client waits for no transfer; then the pages."""
        job = self.scheduler.jobs[chunk.room]
        finished = self.scheduler.finish(chunk, time.monotonic())
        self._prompts.add_scores(chunk.room, result.scores[index])
        token, failure = result.tokens[index], self._prompts.failure(chunk.room)
        if failure is not None:
            self.handover.apply(self.table.end_room(chunk.room, Reason.REJECTED, failure))
        elif token is not None:
            first = FirstTokenData(token, job.length, job.cached, result.logprobs[index])
            self.handover.apply(self.table.first_token(chunk.room, first))
        if chunk.is_last:
            self.table.scored(chunk.room, self._prompts.scores(chunk.room))
        self.handover.post(chunk.room, PagesFinished(job.pages, finished, chunk.is_last))
        self.handover.post(chunk.room, ForwardEnded())

    def _step_failed(self, chunks: list[Chunk], detail: str) -> None:
        for chunk in chunks:
            self.handover.apply(
                self.table.end_room(chunk.room, Reason.FORWARD_FAILED, f"forward failed: {detail}")
            )
            self.handover.post(chunk.room, ForwardEnded())

    # Time, and the end

    def _tick(self, now: float) -> None:
        self.metrics.observe_tick(now, TICK_SECONDS)
        self.links.drain()
        self.handover.drain()
        self.table.set_load(self.view.load())
        self.handover.apply(self.table.handle_timer(now))
        self.links.handle_timer(now)
        if self.table.peers.is_full and not self.is_leaving:
            log.error("decode_incarnations_max is reached: this worker drains and exits")
            self._leave()
        if now - self._checked_at > CHECK_SECONDS and not self.scheduler.has_work:
            self._checked_at = now
            self.check()
            if self.ranks.has_others:
                self.loop.start(self.ranks.check_others(), "check of other ranks")
        # A room that waits for its grammar waits for nothing that could be done here.
        waiting = sum(not job.is_blocked for job in self.scheduler.jobs.values())
        if self._watch.tick(self.executor.step_age(now), waiting, now):
            self.links.announce(now)
        if self._leave_by is not None:
            self._leave_when_done(self._leave_by, now)

    def _leave(self) -> None:
        """Idempotent: SIGTERM and `Drain` may both come, again and again."""
        if self.is_leaving:
            return
        now = time.monotonic()
        log.info("leaving", extra={"rooms": len(self.table.rooms)})
        self._leave_by = now + self.config.shutdown_timeout
        self.handover.apply(self.table.leave())
        self.links.announce(now)
        self._leave_when_done(self._leave_by, now)

    def _leave_when_done(self, leave_by: float, now: float) -> None:
        is_heard = now - self._said_at >= LAST_WORD_SECONDS
        if (not self.table.rooms and is_heard) or now >= leave_by + DRAIN_SECONDS_MAX:
            is_full = self.table.peers.is_full
            self.loop.end(ExitCode.CANNOT_GO_ON if is_full else ExitCode.STOPPED, "left")
        elif now >= leave_by:
            for room in list(self.table.rooms):
                self.handover.apply(self.table.end_room(room, Reason.SHUTDOWN))

    # What others ask

    def _on_request(self, request: Request) -> None:
        match request:
            case Inspect() if request.check and self.ranks.has_others:
                self.loop.start(self._inspected(request), "check of all ranks")
            case Inspect():
                self.links.answer(request, self.view, self.check)
            case Drain():
                self._leave()
            case _:
                self.table.stale["not_for_prefill"] += 1

    def check(self) -> None:
        """Raise AssertionError where an invariant is broken."""
        source_pages = {room: [*job.pages, *job.spare] for room, job in self.scheduler.jobs.items()}
        self.pages.check()
        self.cache.check()
        self.table.check()
        check_prefill(self.table, source_pages, self.pages)
        self.scheduler.check()
        check_own(self._held_by(0), self.rank.check())

    def _held_by(self, rank: int) -> frozenset[Held]:
        """What has not ended there, as far as is known here."""
        rooms = [
            HeldRoom(room, record.generation, self.scheduler.jobs[room].grant.pages)
            for room, record in self.table.rooms.items()
            if rank in record.waiting
        ]
        engines = [
            HeldEngine(decode, generation, name)
            for decode, generation, name in self.table.peers.engines_on(rank)
        ]
        return frozenset((*rooms, *engines))

    async def _inspected(self, request: Inspect) -> None:
        """Everything is checked, on every rank."""
        verdict = await self.ranks.check()
        self.links.answer(request, self.view, self.check, verdict.complaints())
