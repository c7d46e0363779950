"""`pdrt decode`: leases pages, grants them to prefill workers, and generates.

The one place where the decode side's pure parts meet: lease table, page table and scheduler.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import uvloop

from pdrt.config import WorkerConfig
from pdrt.decode.admission import Admission
from pdrt.decode.answers import Answers, Spoken
from pdrt.decode.early_cancels import EarlyCancels
from pdrt.decode.grammars import GrammarEvents, Grammars
from pdrt.decode.handover import DecodeRanks, Handover
from pdrt.decode.judge import refusal
from pdrt.decode.pages import DecodePages
from pdrt.decode.rank import DecodeRank, FromDecodeRank, decode_parts
from pdrt.decode.rooms import RoomEvents, Rooms
from pdrt.decode.steps import Steps
from pdrt.decode.view import DecodeView
from pdrt.ids import Incarnation, RequestId, new_incarnation, short
from pdrt.kv.pages import PageTable
from pdrt.model.collectives import RankPlace
from pdrt.model.executor import Executor
from pdrt.model.steady import steady
from pdrt.observe.metrics import Metrics
from pdrt.observe.tracing import Tracer
from pdrt.observe.worker_http import WorkerHttp
from pdrt.protocol.clock import TICK_SECONDS
from pdrt.protocol.gateway_messages import (
    Cancel,
    Credit,
    Drain,
    Finished,
    FinishReason,
    Inspect,
    Submit,
)
from pdrt.protocol.invariants import check_decode
from pdrt.protocol.leases import LeaseTable
from pdrt.protocol.messages import Fingerprint, FirstTokenData
from pdrt.protocol.pairing import DecodeWorkerInfo
from pdrt.scheduling.decode import DecodeScheduler
from pdrt.scheduling.decode_request import DecodeRequest, End, RequestState
from pdrt.scheduling.local_prefill import LocalPrefill
from pdrt.scheduling.step_plan import StepLimits
from pdrt.transfer.cluster_key import read_key
from pdrt.transfer.gateway_link import GatewayLinks, Request
from pdrt.transfer.liveness import Liveness
from pdrt.transfer.rank_check import check_own
from pdrt.transfer.rank_children import RankChild, watched
from pdrt.transfer.rank_group import RankGroup
from pdrt.transfer.rank_messages import Held, HeldRoom, HeldSegment
from pdrt.transfer.self_watch import SelfWatch
from pdrt.transfer.worker_loop import CHECK_SECONDS, Announce, ExitCode, WorkerLoop, exit_now

log = logging.getLogger(__name__)

STOP_STRING = "stop_string"
"""Why a gateway cancels a request whose output has come to a stop string: its client has all that
it asked for."""


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
    worker = DecodeWorker(config, executor, children)
    announce(worker.facts())
    return await worker.run()


class DecodeWorker:
    """All state of one decode worker. Everything runs on the loop but the forwards."""

    def __init__(
        self, config: WorkerConfig, executor: Executor, children: Sequence[RankChild] = ()
    ) -> None:
        """`children`: the processes of the other ranks, which have loaded their part by now."""
        now = time.monotonic()
        self.config = config
        self.incarnation = new_incarnation()
        self.executor = executor
        self.pages = PageTable(executor.pages)
        self.kv = DecodePages(self.pages, executor.layout, config.scheduler.enable_prefix_caching)
        self.view = DecodeView(self)
        self.metrics = Metrics("decode", short(self.incarnation))
        self.tracer = Tracer(config.observe.otlp_endpoint, "decode", short(self.incarnation))
        identity = executor.identity
        is_checked = config.model.kv_checksum
        self.fingerprint = Fingerprint(
            identity.name, identity.digest, executor.layout, kv_checksum=is_checked
        )
        limits = config.scheduler
        self.scheduler = DecodeScheduler(
            executor.layout,
            identity.max_model_len,
            StepLimits(
                limits.max_num_seqs, limits.max_num_batched_tokens, limits.local_prefill_tokens
            ),
            limits.stream_tokens_max,
            identity.eos_token_ids,
        )
        self.local = LocalPrefill(limits, config.protocol.rooms_per_request_max, now)
        self.loop = WorkerLoop(self._tick, self._leave)
        self.ranks: DecodeRanks = RankGroup(children, FromDecodeRank, self.loop)
        parts = decode_parts(0, config, executor.pool)
        self.rank = DecodeRank(parts, self.loop.start, self.ranks.answer)
        self.ranks.handle, self.ranks.report = self.rank.handle, self.rank.report
        self.ranks.believed = self._held_by
        if children:
            executor.tell_ranks = self.ranks.step
        quarantine = config.protocol.quarantine_pages_max or max(1, executor.pages // 4)
        engines = {name: receiver.fence for name, receiver in parts.receivers.items()}
        ranks = 1 + len(children)
        info = DecodeWorkerInfo(self.incarnation, self.fingerprint, ranks, engines, quarantine)
        self.table = LeaseTable(info, config.protocol, now)
        late = config.protocol.tick_late_seconds
        self.liveness = Liveness(config.scheduler.stall_seconds_max, late, now)
        self._watch = SelfWatch(self.liveness, self.loop, self.view.complaints)
        self.rooms = Rooms(self.table, self.kv, self.scheduler, self.local, self.metrics)
        self.handover = Handover(self.table, self.ranks, config, self.loop, self.rooms.apply)
        self.links = GatewayLinks(
            config.gateway,
            self.incarnation,
            config.protocol,
            self.view.register,
            read_key(config.security),
        )
        self.links.on_request = self._on_request
        self.links.on_gateway_lost = self._on_gateway_lost
        self.links.on_endpoints = self._on_endpoints
        self.answers = Answers(self.incarnation, self.links, self.metrics, self.tracer)
        self.grammars = Grammars(
            executor,
            self.loop,
            GrammarEvents(
                self.scheduler.requests.__contains__, self._grammar_ready, self._grammar_over
            ),
        )
        self.steps = Steps(self)
        self.admission = Admission(self, self.steps.wake)
        self.rooms.attach(
            self.handover,
            RoomEvents(
                self.admission.admit_soon,
                self._take_token,
                self.answers.scores,
                self.steps.wake,
                self._finish,
            ),
        )
        self.http = WorkerHttp(
            config.host,
            config.metrics_port,
            self.view.render,
            self.view.reasons,
            self.view.status,
        )
        self._early_cancels = EarlyCancels()
        self._announced: object = None
        self._leave_by: float | None = None
        self._checked_at = now

    def facts(self) -> dict[str, Any]:
        """What is announced once this worker is up."""
        data = self.rank.data_endpoint
        return {
            "role": "decode",
            "incarnation": short(self.incarnation),
            "metrics": self.http.url,
            **({} if data is None else {"data": data}),
            "pages": self.pages.total,
        }

    async def run(self) -> ExitCode:
        """Serve until told to stop."""
        try:
            return await self.loop.run(compute=self.steps.run(), http=self.http.run())
        finally:
            self.handover.close()
            self.rank.close()
            self.ranks.close()
            self.links.close()
            self.tracer.close()

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
            case Inspect() if request.check and self.ranks.has_others:
                self.loop.start(self._inspected(request), "check of all ranks")
            case Inspect():
                self.links.answer(request, self.view, self.check)

    def _submit(self, submit: Submit) -> None:
        if submit.request in self.scheduler.requests:
            self.table.stale["submit_again"] += 1
            return
        if submit.request in self._early_cancels:
            self.table.stale["submit_after_cancel"] += 1
            return
        end = self._refuse(submit)
        if end is not None:
            self.answers.refused(submit, end)
            return
        self.scheduler.submit(submit, time.monotonic())
        if submit.sampling.grammar is not None:
            self.grammars.begin(submit.request, submit.sampling.grammar)
        self.admission.admit_soon()

    def _refuse(self, submit: Submit) -> End | None:
        identity, layout = self.executor.identity, self.executor.layout
        why = refusal(submit, identity, layout, self.pages.total)
        if why is not None:
            return End(FinishReason.REJECTED, why)
        if self._leave_by is not None:
            return End(FinishReason.UNAVAILABLE, "this decode worker is leaving")
        if self.scheduler.queued >= self.config.scheduler.queue_max:
            return End(FinishReason.OVERLOADED, f"{self.scheduler.queued} requests are queued")
        return None

    def _cancel(self, cancel: Cancel) -> None:
        request = self.scheduler.requests.get(cancel.request)
        if request is None:
            # It has ended already, or did not come yet: either way this ends the gateway's asking.
            self._early_cancels.note(cancel.request)
            self.links.send(Finished(cancel.request, self.incarnation, FinishReason.CANCELLED))
            return
        is_stop = cancel.reason == STOP_STRING
        reason = FinishReason.STOP if is_stop else FinishReason.CANCELLED
        self._finish(request, End(reason, cancel.reason))

    def _credit(self, credit: Credit) -> None:
        request = self.scheduler.requests.get(credit.request)
        if request is None:
            # Its `Submit` never came, or its `Finished` was lost: the client waits for nothing.
            why = "the decode worker does not have this request, or not any more"
            lost = Finished(credit.request, self.incarnation, FinishReason.UNAVAILABLE, detail=why)
            self.links.send(lost)
            return
        request.tokens_taken = max(request.tokens_taken, credit.tokens_taken)
        self.steps.wake()

    def _on_gateway_lost(self, gateway: Incarnation) -> None:
        for request in list(self.scheduler.requests.values()):
            if request.request.gateway == gateway:
                self._finish(request, End(FinishReason.CANCELLED, "its gateway is lost"))

    def _on_endpoints(self) -> None:
        now = time.monotonic()
        listed = self.links.prefill_endpoints
        for endpoint, peer in self.table.pairing.peers.items():
            if peer.is_wanted and endpoint not in listed:
                self.table.unwant(endpoint)
        for endpoint in listed:
            self.handover.apply(self.table.want(endpoint, now))

    def _finish(self, request: DecodeRequest, end: End) -> None:
        """End a request. During a step its pages stay until the step is over."""
        if request.is_in_step:
            request.ended = request.ended or end
            return
        if request.room is not None:
            self.rooms.detach(request.room, end.reason)
        self.kv.give_back(request)
        self.scheduler.remove(request)
        self.grammars.forget(request.request)
        self.answers.end(request, end, time.monotonic())
        self.admission.admit_soon()

    def _take_token(
        self, request: DecodeRequest, first: FirstTokenData, writer: Incarnation, now: float
    ) -> None:
        """A room's first token: to the client at once."""
        index = request.output_tokens
        reason = self.scheduler.take_token(request, first.token)
        self.answers.first_token(request, Spoken(first.token, index, first.logprobs, now, writer))
        if reason is not None:
            self._finish(request, End(reason))

    def _grammar_ready(self, name: RequestId) -> None:
        self.scheduler.requests[name].awaits_grammar = False
        self.steps.wake()

    def _grammar_over(self, name: RequestId, end: End) -> None:
        self._finish(self.scheduler.requests[name], end)

    # Time, and the end

    def _tick(self, now: float) -> None:
        self.metrics.observe_tick(now, TICK_SECONDS)
        self.links.drain()
        self.handover.drain()
        self.table.set_load(self.view.load())
        self.handover.apply(self.table.handle_timer(now))
        for request in self.scheduler.overdue(now):
            self._finish(request, End(FinishReason.DEADLINE, "its time is up"))
        self.local.on_tick(is_paired=bool(self.table.usable_endpoints()), now=now)
        self._give_up_unpaired(now)
        self.admission.admit_soon()
        self.links.handle_timer(now)
        may_serve = self.local.is_on or bool(self.table.usable_endpoints())
        may_admit = self.admission.is_on and may_serve
        waiting = self.scheduler.waiting(may_admit=may_admit)
        self._watch.tick(self.executor.step_age(now), waiting, now)
        self._announce_changes(now)
        if now - self._checked_at > CHECK_SECONDS and not self.scheduler.running:
            self._checked_at = now
            self.check()
            if self.ranks.has_others:
                self.loop.start(self.ranks.check_others(), "check of other ranks")
        if not self.is_leaving and (why := self.rank.restart_reason) is not None:
            log.error("this worker drains and exits", extra={"why": why})
            self._leave()
        if self._leave_by is not None:
            self._leave_when_done(now)

    def _give_up_unpaired(self, now: float) -> None:
        """Without any prefill worker for a while, those who wait for one are told, not kept."""
        seconds_max = self.config.protocol.unpaired_seconds_max
        if self.local.is_on or self.local.unpaired_seconds(now) <= seconds_max:
            return
        for request in list(self.scheduler.requests.values()):
            if request.state is RequestState.QUEUED:
                end = End(FinishReason.UNAVAILABLE, "no prefill worker is paired")
                self._finish(request, end)

    def _leave(self) -> None:
        """Idempotent: SIGTERM and `Drain` may both come, again and again."""
        if self.is_leaving:
            return
        now = time.monotonic()
        log.info("leaving", extra={"requests": len(self.scheduler.requests)})
        self._leave_by = now + self.config.shutdown_timeout
        self.admission.is_on = False
        self.links.announce(now)
        self._leave_when_done(now)

    def _leave_when_done(self, now: float) -> None:
        assert self._leave_by is not None
        # Those who wait, also for a new room, would wait for nothing: no room is opened here.
        for request in list(self.scheduler.requests.values()):
            if request.state is RequestState.QUEUED:
                self._finish(
                    request, End(FinishReason.UNAVAILABLE, "this decode worker is leaving")
                )
        if not self.scheduler.requests:
            is_used_up = self.rank.restart_reason is not None
            self.loop.end(ExitCode.CANNOT_GO_ON if is_used_up else ExitCode.STOPPED, "left")
        elif now >= self._leave_by:
            for request in list(self.scheduler.requests.values()):
                end = End(FinishReason.UNAVAILABLE, "this decode worker is leaving")
                if request.is_in_step:
                    # Pages that a forward uses stay where they are: the process ends with them.
                    self.answers.end(request, end, now)
                else:
                    self._finish(request, end)
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
            self._watch.ailments,
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
        self.grammars.check()
        self.kv.cache.check()
        self.kv.check_sequences({r.request: r.pages for r in self.scheduler.requests.values()})
        check_own(self._held_by(0), self.rank.check())

    def _held_by(self, rank: int) -> frozenset[Held]:
        """What has not ended there, as far as is known here: every rank has every room."""
        leases = self.table.leases.values()
        rooms = [HeldRoom(x.room, x.generation, x.written) for x in leases]
        segments = [HeldSegment(*each) for each in self.table.pairing.segments_on(rank)]
        return frozenset((*rooms, *segments))

    async def _inspected(self, request: Inspect) -> None:
        """Everything is checked, on every rank."""
        verdict = await self.ranks.check()
        self.links.answer(request, self.view, self.check, verdict.complaints())
