"""`pdrt prefill`: computes prompts' KV and pushes it into decode workers' pages.

The one place where the prefill side's pure parts meet: room table, page table and scheduler.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, NoReturn

import uvloop

from pdrt.config import WorkerConfig
from pdrt.ids import RoomId, new_incarnation, short
from pdrt.kv.pages import Owner, OwnerKind, PageTable
from pdrt.model.batch import Row
from pdrt.model.executor import Executor
from pdrt.observe.metrics import Metrics
from pdrt.observe.worker_http import WorkerHttp
from pdrt.prefill.handover import Handover, RoomEffect
from pdrt.prefill.view import PrefillView
from pdrt.protocol.effects import CloseRoom, OpenRoom, ReleaseSource
from pdrt.protocol.gateway_messages import Drain, Inspect
from pdrt.protocol.invariants import check_prefill
from pdrt.protocol.messages import Drained, Fingerprint, FirstTokenData, Grant, Reason
from pdrt.protocol.rooms import PrefillWorkerInfo, RoomTable
from pdrt.scheduling.prefill import Chunk, PrefillScheduler
from pdrt.transfer.gateway_link import GatewayLinks, Request
from pdrt.transfer.local import LocalSender
from pdrt.transfer.processes import this_process
from pdrt.transfer.room_task import ForwardEnded, ForwardStarted, PagesFinished
from pdrt.transfer.worker_loop import CHECK_SECONDS, Announce, ExitCode, WorkerLoop, exit_now

log = logging.getLogger(__name__)

DRAIN_SECONDS_MAX = 5.0
"""What rooms may take to drain at exit, after their time to finish is over."""


def run(config: WorkerConfig, announce: Announce) -> NoReturn:
    """Load the model and serve until told to stop; ends the process with an `ExitCode`.

    Raises:
        PdrtError: the configuration or the model cannot be used; says what to do.
    """
    executor = Executor.load(config.model, config.device, log.info)
    exit_now(uvloop.run(_serve(config, executor, announce)))


async def _serve(config: WorkerConfig, executor: Executor, announce: Announce) -> ExitCode:
    worker = PrefillWorker(config, executor)
    announce(worker.facts())
    return await worker.run()


class PrefillWorker:
    """All state of one prefill worker. Everything runs on the loop but forwards and copies."""

    def __init__(self, config: WorkerConfig, executor: Executor) -> None:
        now = time.monotonic()
        self.config = config
        self.incarnation = new_incarnation()
        self.executor = executor
        self.pages = PageTable(executor.pages)
        self.view = PrefillView(self)
        self.metrics = Metrics("prefill", short(self.incarnation))
        identity = executor.identity
        self.fingerprint = Fingerprint(identity.name, identity.digest, executor.layout)
        limits = config.scheduler
        self.scheduler = PrefillScheduler(
            executor.layout, limits.max_num_batched_tokens, limits.max_num_seqs
        )
        sender = LocalSender(executor.pool, config.protocol.write_seconds_max)
        info = PrefillWorkerInfo(
            self.incarnation, self.fingerprint, (this_process(),), (sender.name,)
        )
        self.table = RoomTable(info, config.protocol, now)
        self.loop = WorkerLoop(self._tick, self._leave)
        self.handover = Handover(self.table, sender, executor.layout, config, self.loop)
        self.handover.judge = self._judge
        self.handover.on_room = self._apply_room
        self.handover.on_end = self._room_ended
        self.links = GatewayLinks(
            config.gateway, self.incarnation, config.protocol, self.view.register, now
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
            return await self.loop.run(self._compute(), self.http.run())
        finally:
            self.handover.close()
            self.links.close()

    # Rooms

    def _judge(self, grant: Grant) -> str | None:
        """Why this worker can never serve `grant`, in words; None when it can."""
        length, limit = len(grant.token_ids), self.executor.identity.max_model_len
        vocabulary = self.executor.identity.vocab_size
        wanted = self.executor.layout.pages_for(length)
        if not 0 < length <= limit:
            return f"{length} tokens; 1 to {limit} can be served"
        if wanted > self.pages.total:
            return f"{length} tokens do not fit into the prefill pool ({self.pages.total} pages)"
        if grant.pages and len(grant.pages) != wanted - grant.first_page:
            return f"{len(grant.pages)} pages from {grant.first_page} on for {length} tokens"
        if not all(0 <= token < vocabulary for token in grant.token_ids):
            return f"token ids must be below {vocabulary}"
        return None

    def _apply_room(self, effect: RoomEffect) -> None:
        match effect:
            case OpenRoom():
                self.scheduler.add(effect.grant, time.monotonic())
                self._work.set()
            case CloseRoom():
                self.scheduler.stop(effect.room)
            case ReleaseSource():
                self._release_source(effect.room)

    def _release_source(self, room: RoomId) -> None:
        """The one place where source pages become free: nobody reads them any more."""
        pages = self.scheduler.forget(room)
        self.pages.free(pages, Owner(OwnerKind.ROOM, room))
        # Somebody may have been waiting for them.
        self._work.set()

    def _room_ended(self, drained: Drained) -> None:
        self.metrics.count_request(drained.outcome.value)
        job = self.scheduler.jobs.get(drained.room)
        if job is None:
            return
        now = time.monotonic()
        self.metrics.count_transfer("local", drained.bytes_written)
        computed_at = job.computed_at or now
        started_at = job.started_at or now
        phases = {
            "queued": started_at - job.queued_at,
            "compute": computed_at - started_at,
            "drain": now - computed_at,
        }
        for phase, seconds in phases.items():
            self.metrics.observe_handover(phase, seconds)
        log.info(
            "room ended",
            extra={
                "room": drained.room,
                "outcome": drained.outcome.value,
                "reason": drained.reason.value if drained.reason is not None else "-",
                "tokens": len(job.grant.token_ids),
                "computed": job.computed,
                "bytes": drained.bytes_written,
                **phases,
            },
        )

    def _take_pages(self, room: RoomId, count: int) -> list[int]:
        return self.pages.take(count, Owner(OwnerKind.ROOM, room))

    # Steps

    async def _compute(self) -> None:
        while not self.loop.is_ending:
            chunks = self.scheduler.plan(self._take_pages, time.monotonic())
            if chunks:
                await self._step(chunks)
            else:
                self._work.clear()
                await self._work.wait()

    async def _step(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self.handover.post(chunk.room, ForwardStarted())
        try:
            result = await self.executor.step([self._row(chunk) for chunk in chunks])
        except AssertionError:
            raise  # our own bug: the worker ends
        except Exception as error:
            log.exception("prefill step failed")
            self._step_failed(chunks, repr(error))
            return
        for chunk, token in zip(chunks, result.tokens, strict=True):
            self._chunk_finished(chunk, token)

    def _row(self, chunk: Chunk) -> Row:
        job = self.scheduler.jobs[chunk.room]
        is_sampled = chunk.is_last and job.grant.sampling.max_tokens > job.grant.output_tokens
        return Row(
            token_ids=job.grant.token_ids[chunk.start : chunk.end],
            start=chunk.start,
            pages=job.pages,
            sampling=job.grant.sampling if is_sampled else None,
            output_tokens=job.grant.output_tokens,
        )

    def _chunk_finished(self, chunk: Chunk, token: int | None) -> None:
        """First the token, so that the client waits for no transfer; then the pages."""
        job = self.scheduler.jobs[chunk.room]
        finished = self.scheduler.finish(chunk, time.monotonic())
        if token is not None:
            first = FirstTokenData(token, len(job.grant.token_ids))
            self.handover.apply(self.table.first_token(chunk.room, first))
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
        if not self.table.rooms or now >= leave_by + DRAIN_SECONDS_MAX:
            is_full = self.table.peers.is_full
            self.loop.end(ExitCode.CANNOT_GO_ON if is_full else ExitCode.STOPPED, "left")
        elif now >= leave_by:
            for room in list(self.table.rooms):
                self.handover.apply(self.table.end_room(room, Reason.SHUTDOWN))

    # What others ask

    def _on_request(self, request: Request) -> None:
        match request:
            case Inspect():
                self.links.answer(request, self.view, self.check)
            case Drain():
                self._leave()
            case _:
                self.table.stale["not_for_prefill"] += 1

    def check(self) -> None:
        """Raise AssertionError where an invariant is broken."""
        held = {room: job.pages for room, job in self.scheduler.jobs.items()}
        self.pages.check()
        self.table.check()
        check_prefill(self.table, held, self.pages)
        self.scheduler.check()
        self.handover.check()
