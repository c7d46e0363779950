"""`pdrt decode`: leases pages, grants them to prefill workers, and generates.

The one place where the decode side's pure parts meet: lease table, page table and scheduler.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, NoReturn

import uvloop

from pdrt.config import WorkerConfig
from pdrt.decode.handover import Handover
from pdrt.decode.rooms import RoomEvents, Rooms
from pdrt.decode.view import DecodeView
from pdrt.ids import Incarnation, RequestId, new_incarnation, short
from pdrt.kv.pages import Owner, OwnerKind, PageTable
from pdrt.model.batch import Row
from pdrt.model.executor import Executor
from pdrt.observe.metrics import Metrics
from pdrt.observe.worker_http import WorkerHttp
from pdrt.protocol.gateway_messages import (
    Cancel,
    Credit,
    Drain,
    Finished,
    FinishReason,
    Inspect,
    Submit,
    Tokens,
    Usage,
)
from pdrt.protocol.invariants import check_decode
from pdrt.protocol.leases import DecodeWorkerInfo, LeaseTable
from pdrt.protocol.messages import Fingerprint
from pdrt.scheduling.decode import (
    DecodeRequest,
    DecodeScheduler,
    PoolView,
    RequestState,
    StepPlan,
    StepRow,
)
from pdrt.transfer.gateway_link import GatewayLinks, Request
from pdrt.transfer.local import LocalReceiver
from pdrt.transfer.worker_loop import CHECK_SECONDS, Announce, ExitCode, WorkerLoop, exit_now

log = logging.getLogger(__name__)


def run(config: WorkerConfig, announce: Announce) -> NoReturn:
    """Load the model and serve until told to stop; ends the process with an `ExitCode`.

    Raises:
        PdrtError: the configuration or the model cannot be used; says what to do.
    """
    executor = Executor.load(config.model, config.device, log.info)
    exit_now(uvloop.run(_serve(config, executor, announce)))


async def _serve(config: WorkerConfig, executor: Executor, announce: Announce) -> ExitCode:
    worker = DecodeWorker(config, executor)
    announce(worker.facts())
    return await worker.run()


class DecodeWorker:
    """All state of one decode worker. Everything runs on the loop but the forwards."""

    def __init__(self, config: WorkerConfig, executor: Executor) -> None:
        now = time.monotonic()
        self.config = config
        self.incarnation = new_incarnation()
        self.executor = executor
        self.pages = PageTable(executor.pages)
        self.view = DecodeView(self)
        self.metrics = Metrics("decode", short(self.incarnation))
        identity = executor.identity
        self.fingerprint = Fingerprint(identity.name, identity.digest, executor.layout)
        self.scheduler = DecodeScheduler(
            executor.layout,
            identity.max_model_len,
            config.scheduler.max_num_seqs,
            config.scheduler.stream_tokens_max,
            identity.eos_token_ids,
        )
        receiver = LocalReceiver(executor.pool)
        quarantine = config.protocol.quarantine_pages_max or max(1, executor.pages // 4)
        info = DecodeWorkerInfo(self.incarnation, self.fingerprint, 1, receiver.fence, quarantine)
        self.table = LeaseTable(info, config.protocol, now)
        self.loop = WorkerLoop(self._tick, self._leave)
        self.rooms = Rooms(self.table, self.pages, self.scheduler, config.protocol, self.metrics)
        self.handover = Handover(self.table, receiver, config.protocol, self.loop, self.rooms.apply)
        self.rooms.attach(self.handover, RoomEvents(self._take_token, self._wake, self._finish))
        self.links = GatewayLinks(
            config.gateway,
            self.incarnation,
            config.protocol,
            self.view.register,
            now,
        )
        self.links.on_request = self._on_request
        self.links.on_gateway_lost = self._on_gateway_lost
        self.links.on_endpoints = self._on_endpoints
        self.http = WorkerHttp(
            config.host,
            config.metrics_port,
            self.view.render,
            self.view.reasons,
            self.view.status,
        )
        self._work = asyncio.Event()
        self._announced: object = None
        self._leave_by: float | None = None
        self._unpaired_since = now
        self._checked_at = now
        self._pool = PoolView(take=self._take_sequence_pages, free=self._free_sequence_pages)

    def facts(self) -> dict[str, Any]:
        """What is announced once this worker is up."""
        return {
            "role": "decode",
            "incarnation": short(self.incarnation),
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

    # Requests

    def _on_request(self, request: Request) -> None:
        match request:
            case Submit():
                self._submit(request)
            case Cancel():
                self._cancel(request)
            case Credit():
                self._credit(request)
            case Drain():
                self._leave()
            case Inspect():
                self.links.answer(request, self.view, self.check)

    def _submit(self, submit: Submit) -> None:
        if submit.request in self.scheduler.requests:
            self.table.stale["submit_again"] += 1
            return
        refused = self._refuse(submit)
        if refused is not None:
            reason, detail = refused
            self.links.send(Finished(submit.request, self.incarnation, reason, detail=detail))
            self.metrics.count_request(reason.value)
            return
        self.scheduler.submit(submit, time.monotonic())
        self.rooms.admit_soon()

    def _refuse(self, submit: Submit) -> tuple[FinishReason, str] | None:
        limit = self.executor.identity.max_model_len
        length = len(submit.token_ids) + len(submit.output_token_ids)
        wants_token = submit.sampling.max_tokens > len(submit.output_token_ids)
        vocabulary = self.executor.identity.vocab_size
        if not submit.token_ids:
            return FinishReason.REJECTED, "the prompt is empty"
        if length + wants_token > limit:
            return FinishReason.REJECTED, f"{length} tokens, {limit} is the model's limit"
        if self.executor.layout.pages_for(length + 1) > self.pages.total:
            return FinishReason.REJECTED, f"{length} tokens do not fit into the KV pool"
        if not all(0 <= token < vocabulary for token in submit.token_ids):
            return FinishReason.REJECTED, f"token ids must be below {vocabulary}"
        if self._leave_by is not None:
            return FinishReason.UNAVAILABLE, "this decode worker is leaving"
        if self.scheduler.queued >= self.config.scheduler.queue_max:
            return FinishReason.OVERLOADED, f"{self.scheduler.queued} requests are queued"
        return None

    def _cancel(self, cancel: Cancel) -> None:
        request = self.scheduler.requests.get(cancel.request)
        if request is None:
            # It has ended already, or never came: either way this ends the gateway's asking.
            self.links.send(Finished(cancel.request, self.incarnation, FinishReason.CANCELLED))
            return
        self._finish(request, FinishReason.CANCELLED, cancel.reason)

    def _credit(self, credit: Credit) -> None:
        request = self.scheduler.requests.get(credit.request)
        if request is None:
            # Its `Submit` never came, or its `Finished` was lost: the client waits for nothing.
            lost = Finished(credit.request, self.incarnation, FinishReason.UNAVAILABLE)
            self.links.send(lost)
            return
        request.tokens_taken = max(request.tokens_taken, credit.tokens_taken)
        self._work.set()

    def _on_gateway_lost(self, gateway: Incarnation) -> None:
        for request in list(self.scheduler.requests.values()):
            if request.request.gateway == gateway:
                self._finish(request, FinishReason.CANCELLED, "its gateway is lost")

    def _on_endpoints(self) -> None:
        now = time.monotonic()
        listed = self.links.prefill_endpoints
        for endpoint, peer in self.table.pairing.peers.items():
            if peer.is_wanted and endpoint not in listed:
                self.table.unwant(endpoint)
        for endpoint in listed:
            self.handover.apply(self.table.want(endpoint, now))

    def _finish(self, request: DecodeRequest, reason: FinishReason, detail: str = "") -> None:
        """End a request. During a step its pages stay until the step is over."""
        if request.is_in_step:
            request.ended = request.ended or reason
            return
        if request.room is not None:
            self.rooms.detach(request.room, reason)
        if request.pages:
            self._free_sequence_pages(request.request, request.pages)
            request.pages = []
        self.scheduler.remove(request)
        self._tell_end(request, reason, detail)
        self.rooms.admit_soon()

    def _tell_end(self, request: DecodeRequest, reason: FinishReason, detail: str) -> None:
        """To the gateway, the metrics and the log."""
        now = time.monotonic()
        self.scheduler.end_phase(request, now)
        usage = Usage(request.prompt_tokens, request.output_tokens, request.cached_tokens)
        finished = Finished(request.request, self.incarnation, reason, usage, detail)
        self.links.send(finished)
        self.metrics.count_request(reason.value)
        for phase, seconds in request.timings.items():
            self.metrics.observe_handover(phase, seconds)
        log.info(
            "request ended",
            extra={
                "request": request.request,
                "room": request.last_room or "-",
                "outcome": reason.value,
                "why": detail or "-",
                "prompt": request.prompt_tokens,
                "output": request.output_tokens,
                "seconds": now - request.arrived_at,
                **request.timings,
            },
        )

    def _take_token(self, request: DecodeRequest, token: int, now: float) -> None:
        """One more output token: to the client at once."""
        index = request.output_tokens
        if index:
            self.metrics.observe_itl(now - request.last_token_at)
        request.last_token_at = now
        reason = self.scheduler.take_token(request, token)
        cached = None if index else request.cached_tokens
        self.links.send(Tokens(request.request, self.incarnation, index, (token,), cached))
        if reason is not None:
            self._finish(request, reason)

    def _take_sequence_pages(self, request: RequestId, count: int) -> list[int]:
        return self.pages.take(count, Owner(OwnerKind.SEQUENCE, request))

    def _free_sequence_pages(self, request: RequestId, pages: list[int]) -> None:
        self.pages.free(pages, Owner(OwnerKind.SEQUENCE, request))

    # Steps

    def _wake(self) -> None:
        self._work.set()

    async def _compute(self) -> None:
        while not self.loop.is_ending:
            plan = self.scheduler.plan(self._pool, time.monotonic())
            for name in plan.preempted:
                request = self.scheduler.requests[name]
                self.metrics.count_preemption()
                self.metrics.count_recomputed_prompt_tokens(len(request.tokens))
                log.info("preempted", extra={"request": name, "tokens": len(request.tokens)})
            if plan.preempted:
                self.rooms.admit_soon()
            if plan.rows:
                await self._step(plan)
            else:
                self._work.clear()
                await self._work.wait()

    async def _step(self, plan: StepPlan) -> None:
        try:
            result = await self.executor.step([self._row(row) for row in plan.rows])
        except AssertionError:
            raise  # our own bug: the worker ends
        except Exception as error:
            if not self.loop.is_ending:
                log.exception("decode step failed")
                self._step_failed(plan, repr(error))
            return
        if self.loop.is_ending:
            return  # its requests have been told, and are gone
        now = time.monotonic()
        for row, token in zip(plan.rows, result.tokens, strict=True):
            request = self.scheduler.requests[row.request]
            self.scheduler.stepped(request)
            if request.ended is not None:
                self._finish(request, request.ended)
                continue
            assert token is not None, row.request
            self._take_token(request, token, now)

    def _row(self, row: StepRow) -> Row:
        request = self.scheduler.requests[row.request]
        return Row(
            token_ids=(row.token,),
            start=row.position,
            pages=row.pages,
            sampling=request.sampling,
            output_tokens=request.output_tokens,
        )

    def _step_failed(self, plan: StepPlan, detail: str) -> None:
        """Nothing of this step counts; its sequences' KV is undefined."""
        for row in plan.rows:
            request = self.scheduler.requests[row.request]
            self.scheduler.stepped(request)
            self._finish(request, request.ended or FinishReason.FAILED, detail)

    # Time, and the end

    def _tick(self, now: float) -> None:
        self.links.drain()
        self.handover.drain()
        self.table.set_load(self.view.load())
        self.handover.apply(self.table.handle_timer(now))
        for request in self.scheduler.overdue(now):
            self._finish(request, FinishReason.DEADLINE, "its time is up")
        self._give_up_unpaired(now)
        self.rooms.admit_soon()
        self.links.handle_timer(now)
        self._announce_changes(now)
        if now - self._checked_at > CHECK_SECONDS and not self.scheduler.running:
            self._checked_at = now
            self.check()
        if self._leave_by is not None:
            self._leave_when_done(now)

    def _give_up_unpaired(self, now: float) -> None:
        """Without any prefill worker for a while, those who wait are told, not kept."""
        if self.table.usable_endpoints():
            self._unpaired_since = now
        elif now - self._unpaired_since > self.config.protocol.unpaired_seconds_max:
            for request in list(self.scheduler.requests.values()):
                if request.state is RequestState.QUEUED:
                    self._finish(request, FinishReason.UNAVAILABLE, "no prefill worker is paired")

    def _leave(self) -> None:
        """Idempotent: SIGTERM and `Drain` may both come, again and again."""
        if self.is_leaving:
            return
        now = time.monotonic()
        log.info("leaving", extra={"requests": len(self.scheduler.requests)})
        self._leave_by = now + self.config.shutdown_timeout
        self.rooms.is_admitting = False
        self.links.announce(now)
        self._leave_when_done(now)

    def _leave_when_done(self, now: float) -> None:
        assert self._leave_by is not None
        # Those who wait, also for a new room, would wait for nothing: no room is opened here.
        for request in list(self.scheduler.requests.values()):
            if request.state is RequestState.QUEUED:
                self._finish(request, FinishReason.UNAVAILABLE, "this decode worker is leaving")
        if not self.scheduler.requests:
            self.loop.end(ExitCode.STOPPED, "left")
        elif now >= self._leave_by:
            for request in list(self.scheduler.requests.values()):
                # Pages that a forward uses stay where they are: the process ends with them.
                end = self._tell_end if request.is_in_step else self._finish
                end(request, FinishReason.UNAVAILABLE, "this decode worker is leaving")
            self.loop.end(ExitCode.STOPPED, "its time to finish is over")

    # What others see

    @property
    def is_leaving(self) -> bool:
        """It takes nothing new and finishes what it has."""
        return self._leave_by is not None

    def _announce_changes(self, now: float) -> None:
        state = (
            tuple(self.table.usable_endpoints()),
            self.view.refused_pairs(),
            bool(self.view.complaints()),
        )
        if state != self._announced:
            self._announced = state
            self.links.announce(now)

    def check(self) -> None:
        """Raise AssertionError where an invariant is broken."""
        self.pages.check()
        self.table.check()
        check_decode(self.table, self.pages)
        self.scheduler.check()
        self.rooms.check()
        owned = {r.request: set(r.pages) for r in self.scheduler.requests.values() if r.pages}
        found = {o.key: p for o, p in self.pages.pages_of(OwnerKind.SEQUENCE).items()}
        assert owned == found, (owned, found)
