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

from pdrt.decode.answers import Answers, Spoken
from pdrt.decode.grammars import Grammars
from pdrt.decode.pages import DecodePages
from pdrt.decode.rooms import Rooms
from pdrt.model.batch import Row, StepResult
from pdrt.model.executor import Executor
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.scheduling.decode import DecodeScheduler
from pdrt.scheduling.decode_request import DecodeRequest, End
from pdrt.transfer.liveness import Liveness
from pdrt.transfer.worker_loop import WorkerLoop

log = logging.getLogger(__name__)


class Outcome(msgspec.Struct, frozen=True):
    """What a step brought one sequence; still to be told."""

    request: DecodeRequest
    spoken: Spoken | None
    end: End | None


class Computing(Protocol):
    """The parts of a decode worker that its steps need."""

    executor: Executor
    scheduler: DecodeScheduler
    kv: DecodePages
    rooms: Rooms
    grammars: Grammars
    answers: Answers
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
                outcomes = await self._result(plan.sequences, step)

    def _submit(self, sequences: Sequence[DecodeRequest]) -> asyncio.Future[StepResult]:
        assert all(map(self._worker.kv.is_writable, sequences)), "a step would write a cached page"
        return asyncio.ensure_future(self._worker.executor.step(list(map(self._row, sequences))))

    def _row(self, request: DecodeRequest) -> Row:
        has_grammar = request.sampling.grammar is not None
        return Row(
            token_ids=(request.tokens[-1],),
            start=request.computed,
            pages=request.pages,
            sampling=request.sampling,
            output_tokens=request.output_tokens,
            history=request.tokens if request.needs_history else (),
            matcher=self._worker.grammars.matcher(request.request) if has_grammar else None,
        )

    async def _result(
        self, sequences: Sequence[DecodeRequest], step: asyncio.Future[StepResult]
    ) -> list[Outcome]:
        try:
            result = await step
        except AssertionError:
            raise  # our own bug: the worker ends
        except Exception as error:
            if self._worker.loop.is_ending:
                return []
            log.exception("decode step failed")
            why = repr(error)
            self._worker.liveness.forward_failed(why, time.monotonic())
            return [self._failed(each, FinishReason.FAILED, why) for each in sequences]
        if self._worker.loop.is_ending:
            return []  # its requests have been told, and are gone
        now = time.monotonic()
        self._worker.liveness.forward_ended()
        self._worker.answers.stepped(result.seconds, len(sequences))
        rows = zip(sequences, result.tokens, result.logprobs, strict=True)
        outcomes: list[Outcome] = []
        for request, token, logprobs in rows:
            assert token is not None, request.request
            failure = self._worker.grammars.failure(request.request)
            if failure is not None:
                outcomes.append(self._failed(request, FinishReason.REJECTED, failure))
                continue
            spoken = Spoken(token, request.output_tokens, logprobs, now)
            outcomes.append(self._stepped(request, spoken))
        return outcomes

    def _stepped(self, request: DecodeRequest, spoken: Spoken) -> Outcome:
        self._worker.scheduler.stepped(request)
        end = request.ended
        if end is not None:
            told = None  # nobody waits for its token any more
        else:
            told = spoken
            reason = self._worker.scheduler.take_token(request, spoken.token)
            end = None if reason is None else End(reason)
        if end is not None:
            self._worker.kv.give_back(request)
            self._remove(request)
        return Outcome(request, told, end)

    def _failed(self, request: DecodeRequest, reason: FinishReason, detail: str) -> Outcome:
        """Nothing of it is kept: its KV may be undefined."""
        self._worker.scheduler.step_failed(request)
        self._worker.kv.release(request)
        self._remove(request)
        return Outcome(request, None, request.ended or End(reason, detail))

    def _remove(self, request: DecodeRequest) -> None:
        self._worker.scheduler.remove(request)
        self._worker.grammars.forget(request.request)

    def _tell(self, outcomes: Sequence[Outcome], preempted: Sequence[DecodeRequest]) -> None:
        worker, now = self._worker, time.monotonic()
        spoken = [(o.request, o.spoken) for o in outcomes if o.spoken is not None]
        if spoken:
            worker.answers.step(spoken)
        for outcome in outcomes:
            if outcome.end is not None:
                worker.answers.end(outcome.request, outcome.end, now)
                worker.rooms.admit_soon()
        for request in preempted:
            worker.answers.preempted(request)
            worker.rooms.admit_soon()
