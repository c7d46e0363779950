"""What a decode worker says of its requests: to their gateways, to the metrics, to the log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import msgspec

from pdrt.ids import Incarnation
from pdrt.observe.metrics import Metrics
from pdrt.observe.tracing import Attributes, Tracer
from pdrt.protocol.gateway_messages import (
    Finished,
    FinishReason,
    PromptLogprobs,
    Submit,
    Tokens,
    Usage,
)
from pdrt.sampling import TokenLogprobs
from pdrt.scheduling.decode_request import DecodeRequest, End
from pdrt.scheduling.step_plan import StepPlan
from pdrt.transfer.gateway_link import GatewayLinks

log = logging.getLogger(__name__)

SPAN_BY_PHASE = {
    "queued": "decode.queue",
    "prefill": "decode.prefill_wait",
    "transfer": "decode.transfer_wait",
    "decode": "decode.generate",
}


class Spoken(msgspec.Struct, frozen=True, gc=False):
    """One output token of one request."""

    token: int
    index: int
    """In the output."""
    logprobs: TokenLogprobs | None
    at: float
    """When it was sampled."""
    prefill: Incarnation | None = None
    """Who computed the prompt, with the first token after it."""


class Answers:
    """Tells what was decided. Changes nothing of a request but what it has been told."""

    def __init__(
        self, worker: Incarnation, links: GatewayLinks, metrics: Metrics, tracer: Tracer
    ) -> None:
        self._worker = worker
        self._links = links
        self._metrics = metrics
        self._tracer = tracer

    def first_token(self, request: DecodeRequest, spoken: Spoken) -> None:
        """Of a room."""
        self._count([(request, spoken)])
        self._links.send(self._tokens(request, spoken))

    def prefilled_here(self, request: DecodeRequest, now: float) -> None:
        """Its prompt is computed, and the token after it sampled."""
        if not request.output_tokens:
            self._metrics.observe_ttft(now - request.arrived_at)

    def step(self, spoken: Sequence[tuple[DecodeRequest, Spoken]]) -> None:
        """What a step has yielded."""
        self._count(spoken)
        self._links.send_step([self._tokens(request, one) for request, one in spoken])

    def _count(self, spoken: Sequence[tuple[DecodeRequest, Spoken]]) -> None:
        """Them, and the gaps before them: most of a step's waited for the same two steps."""
        self._metrics.count_output_tokens(len(spoken))
        gaps = Counter(one.at - request.last_token_at for request, one in spoken if one.index)
        for seconds, times in gaps.items():
            self._metrics.observe_itl(seconds, times)

    def _tokens(self, request: DecodeRequest, spoken: Spoken) -> Tokens:
        request.last_token_at = spoken.at
        return Tokens(
            request.request,
            self._worker,
            spoken.index,
            (spoken.token,),
            None if spoken.index else request.cached_tokens,
            () if spoken.logprobs is None else (spoken.logprobs,),
            spoken.prefill,
        )

    def scores(
        self, request: DecodeRequest, scores: tuple[TokenLogprobs, ...], prefill: Incarnation
    ) -> None:
        """The prompt's log probabilities."""
        cached = request.cached_tokens
        self._links.send(PromptLogprobs(request.request, self._worker, scores, cached, prefill))

    def refused(self, submit: Submit, end: End) -> None:
        """It was not taken at all."""
        self._links.send(Finished(submit.request, self._worker, end.reason, detail=end.detail))
        self._metrics.count_request(end.reason.value)

    def end(self, request: DecodeRequest, end: End, now: float) -> None:
        """It is over."""
        request.end_last_phase(now)
        usage = Usage(request.prompt_tokens, request.output_tokens, request.cached_tokens)
        self._links.send(Finished(request.request, self._worker, end.reason, usage, end.detail))
        self._metrics.count_request(end.reason.value)
        for phase, seconds in request.timings.items():
            self._metrics.observe_handover(phase, seconds)
        log.info(
            "request ended",
            extra={
                "request": request.request,
                "request_id": request.context.request_id or "-",
                "room": request.last_room or "-",
                "outcome": end.reason.value,
                "why": _why(end),
                "prompt_tokens": request.prompt_tokens,
                "output_tokens": request.output_tokens,
                "cached_tokens": request.cached_tokens,
                "seconds": now - request.arrived_at,
                **{f"{phase}_seconds": spent for phase, spent in request.timings.items()},
            },
        )
        if self._tracer.is_on:
            self._trace(request, end)

    def _trace(self, request: DecodeRequest, end: End) -> None:
        parent = request.context.traceparent
        attributes: Attributes = {
            "pdrt.request": str(request.request),
            "pdrt.request_id": request.context.request_id,
            "pdrt.output_tokens": request.output_tokens,
            "pdrt.outcome": end.reason.value,
        }
        for phase in request.phases:
            name, room = SPAN_BY_PHASE[phase.name], str(phase.room or "")
            of_phase = {**attributes, "pdrt.room": room}
            self._tracer.record(name, parent, phase.began_at, phase.ended_at, of_phase)

    def preempted(self, request: DecodeRequest) -> None:
        """It has given its pages up, and resumes by a new room."""
        self._metrics.count_preemption()
        self._metrics.count_recomputed_prompt_tokens(len(request.tokens))
        log.info(
            "preempted",
            extra={
                "request": request.request,
                "request_id": request.context.request_id or "-",
                "tokens": len(request.tokens),
            },
        )

    def stepped(self, seconds: float, plan: StepPlan) -> None:
        """A step is over."""
        self._metrics.observe_step(seconds, len(plan.sequences), plan.tokens)
        if plan.prompt_tokens:
            self._metrics.count_local_prefill_tokens(plan.prompt_tokens)


def _why(end: End) -> str:
    """For the log. A refusal may quote its client, whose grammar it was, say: it alone is told."""
    return "-" if end.reason is FinishReason.REJECTED or not end.detail else end.detail
