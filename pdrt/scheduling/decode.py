"""Which requests a decode worker admits, runs, pauses and preempts. Pure.

A request waits (QUEUED) for pages, is prefilled elsewhere (PREFILLING) and then decoded
(RUNNING). Pages are leased for the whole prompt before prefill starts; a running sequence grows
page by page, and when none is free the youngest is preempted: it gives its pages up and resumes
by a new room, its output being part of the prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum

import msgspec

from pdrt.errors import PoolExhausted
from pdrt.ids import RequestId, RoomId
from pdrt.kv.layout import KvLayout
from pdrt.protocol.gateway_messages import FinishReason, Submit
from pdrt.sampling import Sampling


class RequestState(Enum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    RUNNING = "running"


class DecodeRequest:
    """One attempt at a request, on this worker."""

    def __init__(self, submit: Submit, now: float) -> None:
        self.request = submit.request
        self.sampling: Sampling = submit.sampling
        self.endpoints = submit.prefill_endpoints
        self.state = RequestState.QUEUED
        self.prompt_tokens = len(submit.token_ids)
        self.tokens = [*submit.token_ids, *submit.output_token_ids]
        """Prompt, then output, whoever computed it."""
        self.deadline = now + submit.seconds_max
        self.arrived_at = now
        self.order = 0
        """Of arrival on this worker; the youngest is preempted first."""
        self.room: RoomId | None = None
        """Exactly while PREFILLING."""
        self.last_room: RoomId | None = None
        """For the log: what the prefill worker calls it."""
        self.pages: list[int] = []
        """Exactly while RUNNING; covers `computed` tokens."""
        self.computed = 0
        """Tokens whose KV is in `pages`: all but the last one sampled."""
        self.rooms_failed = 0
        self.tokens_taken = len(submit.output_token_ids)
        """Output tokens that the client has taken."""
        self.cached_tokens = 0
        self.is_in_step = False
        self.ended: FinishReason | None = None
        """Set when it ended during a step: it leaves after the step."""
        self.last_token_at = now
        self.timings: dict[str, float] = {}
        self.phase_began_at = now

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens


class StepRow(msgspec.Struct, frozen=True):
    """One running sequence's part of a step."""

    request: RequestId
    token: int
    position: int
    pages: tuple[int, ...]


class StepPlan(msgspec.Struct, frozen=True):
    """What the next step computes, and who had to give up pages for it."""

    rows: tuple[StepRow, ...]
    preempted: tuple[RequestId, ...]


class PoolView(msgspec.Struct, frozen=True):
    """What the scheduler may ask of the pool; the worker owns it."""

    take: Callable[[RequestId, int], list[int]]
    """Take free pages for a sequence, or raise PoolExhausted."""
    free: Callable[[RequestId, list[int]], None]
    """Give a sequence's pages back."""


class DecodeScheduler:
    """All requests of one decode worker."""

    def __init__(
        self,
        layout: KvLayout,
        max_model_len: int,
        max_num_seqs: int,
        stream_tokens_max: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.requests: dict[RequestId, DecodeRequest] = {}
        self._layout = layout
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._stream_tokens_max = stream_tokens_max
        self._eos_token_ids = frozenset(eos_token_ids)
        # QUEUED requests; preempted ones stand in front.
        self._queue: deque[RequestId] = deque()
        # RUNNING requests, in the order in which they joined.
        self._running: dict[RequestId, DecodeRequest] = {}
        self._orders = 0

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return len(self._running)

    def _is_paused(self, request: DecodeRequest) -> bool:
        """Its client does not read: it computes nothing more for now, instead of piling up."""
        return request.output_tokens - request.tokens_taken >= self._stream_tokens_max

    # In and out

    def submit(self, submit: Submit, now: float) -> DecodeRequest:
        """Queue a new request."""
        assert submit.request not in self.requests, submit.request
        request = DecodeRequest(submit, now)
        self._orders += 1
        request.order = self._orders
        self.requests[submit.request] = request
        self._queue.append(submit.request)
        return request

    def remove(self, request: DecodeRequest) -> None:
        """The request is over; its pages have been seen to by the caller."""
        assert not request.is_in_step, request.request
        del self.requests[request.request]
        self._running.pop(request.request, None)
        if request.state is RequestState.QUEUED:
            self._queue.remove(request.request)

    # Admission

    def head(self) -> DecodeRequest | None:
        """Who is admitted next, if anybody waits and a place is free."""
        prefilling = len(self.requests) - len(self._queue) - len(self._running)
        if not self._queue or prefilling + len(self._running) >= self._max_num_seqs:
            return None
        return self.requests[self._queue[0]]

    @staticmethod
    def wants_token(request: DecodeRequest) -> bool:
        """It may have one more output token; if not, prefill is all that it waits for."""
        return request.output_tokens < request.sampling.max_tokens

    def pages_wanted(self, request: DecodeRequest) -> tuple[int, int]:
        """(pages that the writer fills, pages to lease): the prompt's, and room for the first
        token that decode computes itself. None for a request that decodes nothing."""
        if request.sampling.max_tokens - request.output_tokens <= 1:
            return 0, 0
        length = len(request.tokens)
        return self._layout.pages_for(length), self._layout.pages_for(length + 1)

    def admitted(self, request: DecodeRequest, room: RoomId, now: float) -> None:
        """Its room has been opened."""
        assert self._queue[0] == request.request, request.request
        self._queue.popleft()
        request.state = RequestState.PREFILLING
        request.room = request.last_room = room
        self._phase(request, "queued", now)

    def requeue(self, request: DecodeRequest, now: float) -> None:
        """Its room gave nothing, or it was preempted: it goes on first of all, in a new room."""
        assert request.state is not RequestState.QUEUED, request.request
        self._running.pop(request.request, None)
        phase = "prefill" if request.state is RequestState.PREFILLING else "decode"
        self._phase(request, phase, now)
        request.state = RequestState.QUEUED
        request.room = None
        request.pages, request.computed = [], 0
        self._queue.appendleft(request.request)

    def ready(self, request: DecodeRequest, pages: list[int], computed: int, now: float) -> None:
        """Its KV has landed: `computed` tokens in `pages`, and at least one more to feed."""
        assert request.state is RequestState.PREFILLING, request.state
        assert computed == len(request.tokens) - 1, (computed, len(request.tokens))
        assert self._layout.pages_for(computed) <= len(pages), (computed, len(pages))
        request.state = RequestState.RUNNING
        request.room = None
        request.pages, request.computed = pages, computed
        self._running[request.request] = request
        self._phase(request, "transfer", now)

    def end_phase(self, request: DecodeRequest, now: float) -> None:
        """The request is over: what it was doing counts up to now."""
        if request.state is RequestState.QUEUED:
            self._phase(request, "queued", now)
        elif request.state is RequestState.RUNNING:
            self._phase(request, "decode", now)
        elif "prefill" in request.timings:
            self._phase(request, "transfer", now)
        else:
            self._phase(request, "prefill", now)

    @staticmethod
    def _phase(request: DecodeRequest, phase: str, now: float) -> None:
        spent = now - request.phase_began_at
        request.timings[phase] = request.timings.get(phase, 0.0) + spent
        request.phase_began_at = now

    # Steps

    def plan(self, pool: PoolView, now: float) -> StepPlan:
        """The next step: one token of every sequence that can go on, oldest first."""
        rows: list[StepRow] = []
        preempted: list[RequestId] = []
        for request in sorted(self._running.values(), key=lambda r: r.order):
            if request.request not in self._running or self._is_paused(request):
                continue
            if self._grow(request, pool, preempted, now):
                token, position = request.tokens[-1], request.computed
                rows.append(StepRow(request.request, token, position, tuple(request.pages)))
        for row in rows:
            self.requests[row.request].is_in_step = True
        return StepPlan(tuple(rows), tuple(preempted))

    def _grow(
        self, request: DecodeRequest, pool: PoolView, preempted: list[RequestId], now: float
    ) -> bool:
        """Cover one more token; False when the request itself had to give way."""
        wanted = self._layout.pages_for(request.computed + 1)
        while len(request.pages) < wanted:
            try:
                request.pages += pool.take(request.request, 1)
            except PoolExhausted:
                youngest = max(self._running.values(), key=lambda r: r.order)
                pool.free(youngest.request, youngest.pages)
                self.requeue(youngest, now)
                preempted.append(youngest.request)
                if youngest is request:
                    return False
        return True

    def stepped(self, request: DecodeRequest) -> None:
        """A step with this request in it is over: its last token's KV is in the pool."""
        assert request.is_in_step, request.request
        request.is_in_step = False
        request.computed += 1

    def first_token(self, request: DecodeRequest, cached_tokens: int, now: float) -> None:
        """Its prefill has been computed; what is left of its room is the transfer."""
        assert request.state is RequestState.PREFILLING, request.state
        if not request.output_tokens:
            request.cached_tokens = cached_tokens
        self._phase(request, "prefill", now)

    def take_token(self, request: DecodeRequest, token: int) -> FinishReason | None:
        """One more output token, from a step or from prefill; says whether it was the last."""
        request.tokens.append(token)
        sampling = request.sampling
        if request.output_tokens > sampling.min_tokens:
            is_eos = token in self._eos_token_ids and not sampling.ignore_eos
            if is_eos or token in sampling.stop_token_ids:
                return FinishReason.STOP
        is_full = len(request.tokens) >= self._max_model_len
        if is_full or request.output_tokens >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def overdue(self, now: float) -> list[DecodeRequest]:
        """Requests whose deadline has passed."""
        return [r for r in self.requests.values() if now >= r.deadline]

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        assert len(set(self._queue)) == len(self._queue)
        for request in self.requests.values():
            is_queued = request.state is RequestState.QUEUED
            is_running = request.state is RequestState.RUNNING
            assert is_queued == (request.request in self._queue), request.request
            assert is_running == (request.request in self._running), request.request
            assert (request.room is not None) == (request.state is RequestState.PREFILLING)
            assert is_running or not request.pages, request.request
            if is_running:
                assert self._layout.pages_for(request.computed) <= len(request.pages)
