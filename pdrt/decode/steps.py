"""The steps of a decode worker, one after the other.

Between two steps only what the next one depends on is done: taking the tokens, letting go of
what ended, planning. What the last one yielded is told while the next one runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from pdrt.decode.admission import Admission
from pdrt.decode.answers import Answers, Spoken
from pdrt.decode.grammars import Grammars
from pdrt.decode.handover import DecodeRanks
from pdrt.decode.pages import DecodePages
from pdrt.decode.prompt_row import prompt_row
from pdrt.errors import DeviceLost
from pdrt.ids import Incarnation
from pdrt.model.batch import Row, StepResult
from pdrt.model.executor import Executor
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.sampling import TokenLogprobs
from pdrt.scheduling.decode import DecodeScheduler
from pdrt.scheduling.decode_request import DecodeRequest, End, LocalReason
from pdrt.scheduling.local_prefill import LocalPrefill
from pdrt.scheduling.step_plan import StepPlan
from pdrt.transfer.liveness import Liveness
from pdrt.transfer.worker_loop import WorkerLoop

log = logging.getLogger(__name__)


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """What a step brought one sequence; still to be told."""

    request: DecodeRequest
    spoken: Spoken | None
    end: End | None
    scores: tuple[TokenLogprobs, ...] | None = None
    """Of its prompt, where they were awaited and that is computed now."""


class Computing(Protocol):
    """The parts of a decode worker that its steps need."""

    incarnation: Incarnation
    executor: Executor
    scheduler: DecodeScheduler
    kv: DecodePages
    ranks: DecodeRanks
    admission: Admission
    grammars: Grammars
    answers: Answers
    local: LocalPrefill
    loop: WorkerLoop
    liveness: Liveness


class Steps:
    """The one task that computes. `wake` it when there may be something to compute."""

    def __init__(self, worker: Computing) -> None:
        self._worker = worker
        self._work = asyncio.Event()

    def wake(self) -> None:
        self._work.set()

    async def run(self) -> None:
        """Until the worker ends. There is no `await` between the end of a step and the start of
        the next one, nor before its outcomes are told: nobody sees a token that is not told."""
        worker, outcomes = self._worker, list[Outcome]()
        while not worker.loop.is_ending:
            self._work.clear()
            plan = worker.scheduler.plan(worker.kv, time.monotonic())
            step = self._submit(plan.sequences) if plan.sequences else None
            self._tell(outcomes, plan.preempted)
            outcomes = []
            if step is None:
                await self._work.wait()
            else:
                worker.scheduler.grow_ahead(worker.kv)
                outcomes = await self._result(plan, step)

    def _submit(self, sequences: Sequence[DecodeRequest]) -> asyncio.Future[StepResult]:
        assert all(map(self._worker.kv.is_writable, sequences)), "a step would write a cached page"
        return asyncio.ensure_future(self._worker.executor.step(list(map(self._row, sequences))))

    def _row(self, request: DecodeRequest) -> Row:
        has_matcher = request.sampling.grammar is not None and not request.awaits_grammar
        matcher = self._worker.grammars.matcher(request.request) if has_matcher else None
        if request.prefills_here:
            return prompt_row(request, self._worker.scheduler.wants_token(request), matcher)
        return Row(
            token_ids=(request.tokens[-1],),
            start=request.computed,
            pages=request.pages,
            sampling=request.sampling,
            output_tokens=request.output_tokens,
            history=request.tokens if request.needs_history else (),
            matcher=matcher,
        )

    async def _result(self, plan: StepPlan, step: asyncio.Future[StepResult]) -> list[Outcome]:
        try:
            result = await step
        except (AssertionError, DeviceLost):
            raise  # our own bug, or a broken GPU: the worker ends
        except Exception as error:
            if self._worker.loop.is_ending:
                return []
            log.exception("decode step failed")
            if self._worker.ranks.has_others:
                await self._worker.ranks.forward_failed(repr(error))
                return []
            why = repr(error)
            self._worker.liveness.forward_failed(why, time.monotonic())
            return self._step_failed(plan.sequences, End(FinishReason.FAILED, why))
        if self._worker.loop.is_ending:
            return []  # its requests have been told, and are gone
        now = time.monotonic()
        self._worker.liveness.forward_ended()
        self._worker.answers.stepped(result.seconds, plan)
        outcomes: list[Outcome] = []
        for index, request in enumerate(plan.sequences):
            failure = self._worker.grammars.failure(request.request)
            if failure is not None:
                outcomes.append(self._failed(request, End(FinishReason.REJECTED, failure)))
            elif request.prefills_here:
                outcomes.append(self._computed(request, result, index, now))
            else:
                token = result.tokens[index]
                assert token is not None, request.request
                spoken = Spoken(token, request.output_tokens, result.logprobs[index], now)
                self._worker.scheduler.stepped(request)
                outcomes.append(self._spoken(request, spoken))
        return outcomes

    def _computed(
        self, request: DecodeRequest, result: StepResult, index: int, now: float
    ) -> Outcome:
        """A part of a prompt, which is row `index` of the step."""
        worker = self._worker
        worker.scheduler.stepped(request)
        request.scores += result.scores[index]
        if request.ended is not None:
            return self._leave(request, None, request.ended)
        if request.computed < len(request.tokens):
            return Outcome(request, None, None)
        worker.kv.keep(request)
        scores = tuple(request.scores) if request.awaits_scores else None
        request.awaits_scores = False
        if request.here is LocalReason.SHORT:
            worker.local.computed_here(now - request.phase_began_at)
        worker.scheduler.prefilled_here(request, now)
        worker.admission.admit_soon()  # the next prompt may begin
        token = result.tokens[index]
        if token is None:
            return self._leave(request, None, End(FinishReason.LENGTH), scores)
        worker.answers.prefilled_here(request, now)
        logprobs, prefill = result.logprobs[index], worker.incarnation
        spoken = Spoken(token, request.output_tokens, logprobs, now, prefill)
        return self._spoken(request, spoken, scores)

    def _spoken(
        self,
        request: DecodeRequest,
        spoken: Spoken,
        scores: tuple[TokenLogprobs, ...] | None = None,
    ) -> Outcome:
        end = request.ended
        if end is not None:
            return self._leave(request, None, end)  # nobody waits for its token any more
        reason = self._worker.scheduler.take_token(request, spoken.token)
        if reason is not None:
            return self._leave(request, spoken, End(reason), scores)
        return Outcome(request, spoken, None, scores)

    def _leave(
        self,
        request: DecodeRequest,
        spoken: Spoken | None,
        end: End,
        scores: tuple[TokenLogprobs, ...] | None = None,
    ) -> Outcome:
        """What it has computed is sound."""
        self._worker.kv.give_back(request)
        self._remove(request)
        return Outcome(request, spoken, end, scores)

    def _step_failed(self, sequences: Sequence[DecodeRequest], end: End) -> list[Outcome]:
        """Prompts that are computed here bear the blame alone, if there are any. The others are as
        they were before: the next step writes the KV again that this one may have left undefined,
        and draws the same tokens."""
        has_prompts = any(request.prefills_here for request in sequences)
        outcomes: list[Outcome] = []
        for request in sequences:
            if has_prompts and not request.prefills_here and request.ended is None:
                self._worker.scheduler.step_failed(request)
            else:
                outcomes.append(self._failed(request, end))
        return outcomes

    def _failed(self, request: DecodeRequest, end: End) -> Outcome:
        """Nothing of it is kept: its KV may be undefined."""
        self._worker.scheduler.step_failed(request)
        self._worker.kv.release(request)
        self._remove(request)
        return Outcome(request, None, request.ended or end)

    def _remove(self, request: DecodeRequest) -> None:
        self._worker.scheduler.remove(request)
        self._worker.grammars.forget(request.request)

    def _tell(self, outcomes: Sequence[Outcome], preempted: Sequence[DecodeRequest]) -> None:
        worker, now = self._worker, time.monotonic()
        for outcome in outcomes:
            if outcome.scores is not None:
                worker.answers.scores(outcome.request, outcome.scores, worker.incarnation)
        spoken = [(o.request, o.spoken) for o in outcomes if o.spoken is not None]
        if spoken:
            worker.answers.step(spoken)
        for outcome in outcomes:
            if outcome.end is not None:
                worker.answers.end(outcome.request, outcome.end, now)
                worker.admission.admit_soon()
        for request in preempted:
            worker.answers.preempted(request)
            worker.admission.admit_soon()
