"""Which requests a decode worker admits, runs, pauses and preempts. Pure.

A request waits (QUEUED) for pages, is prefilled elsewhere (PREFILLING) and then decoded
(RUNNING). Pages are leased for the whole prompt before prefill starts; a running sequence grows
page by page, and when none is free the youngest is preempted: it gives its pages up and resumes
by a new room, its output being part of the prompt. A prompt that is computed here
(`local_prefill`) has no room: it is RUNNING at once, in pages of its own, and is fed part by part
beside the others' single tokens.

A step is planned between the end of the one before and its own start, so that whoever joined,
ended or was given credit meanwhile counts. What takes time is done while a step runs: pages for
the next one are taken ahead, as if every sequence went on.
"""

from __future__ import annotations

from collections import deque

import msgspec

from pdrt.errors import PoolExhausted
from pdrt.ids import RequestId, RoomId
from pdrt.kv.layout import KvLayout
from pdrt.protocol.gateway_messages import FinishReason, Submit
from pdrt.sampling import Sampling
from pdrt.scheduling.decode_request import DecodeRequest, LocalReason, RequestState
from pdrt.scheduling.local_prefill import share_out
from pdrt.scheduling.prefill import SCORED_TOKENS_MAX
from pdrt.scheduling.step_plan import PagesWanted, SequencePool, StepLimits, StepPlan


class DecodeScheduler:
    """All requests of one decode worker."""

    def __init__(
        self,
        layout: KvLayout,
        max_model_len: int,
        limits: StepLimits,
        stream_tokens_max: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.requests: dict[RequestId, DecodeRequest] = {}
        self._layout = layout
        self._max_model_len = max_model_len
        self._limits = limits
        self._stream_tokens_max = stream_tokens_max
        self._eos_token_ids = frozenset(eos_token_ids)
        # QUEUED requests; preempted ones stand in front.
        self._queue: deque[RequestId] = deque()
        # RUNNING requests, oldest first.
        self._running: dict[RequestId, DecodeRequest] = {}
        self._orders = 0

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return len(self._running)

    def waiting(self, *, may_admit: bool) -> int:
        """Requests that could be got on with here and now: sequences that the next step takes
        along, and, where rooms may be opened, the queue. While rooms are open it is their writers
        that are waited for, and their pages."""
        runnable = sum(self._computable(request) > 0 for request in self._running.values())
        prefilling = len(self.requests) - len(self._queue) - len(self._running)
        return runnable + (len(self._queue) if may_admit and not prefilling else 0)

    @property
    def prompts_here(self) -> int:
        """Sequences whose prompts are being computed here."""
        return sum(request.prefills_here for request in self._running.values())

    def _computable(self, request: DecodeRequest) -> int:
        """How many of its tokens may be fed now: none while its client does not read, so that
        nothing piles up; and its last one not before it is known what may come next."""
        tokens = len(request.tokens)
        if tokens - request.prompt_tokens - request.tokens_taken >= self._stream_tokens_max:
            return 0
        return tokens - request.computed - request.awaits_grammar

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
        """The request is over; its pages have been given back."""
        assert not request.is_in_step and not request.pages, request.request
        del self.requests[request.request]
        self._running.pop(request.request, None)
        if request.state is RequestState.QUEUED:
            self._queue.remove(request.request)

    # Admission

    def head(self) -> DecodeRequest | None:
        """Who is admitted next, if anybody waits and a place is free."""
        prefilling = len(self.requests) - len(self._queue) - len(self._running)
        if not self._queue or prefilling + len(self._running) >= self._limits.sequences:
            return None
        return self.requests[self._queue[0]]

    @staticmethod
    def wants_token(request: DecodeRequest) -> bool:
        """It may have one more output token; if not, prefill is all that it waits for."""
        return request.output_tokens < request.sampling.max_tokens

    def pages_wanted(self, request: DecodeRequest) -> PagesWanted:
        """The prompt's, and room for the first token that decode computes itself. None for a
        request that decodes nothing."""
        if request.sampling.max_tokens - request.output_tokens <= 1:
            return PagesWanted(0, 0)
        length = len(request.tokens)
        return PagesWanted(self._layout.pages_for(length), self._layout.pages_for(length + 1))

    def pages_here(self, request: DecodeRequest) -> int:
        """For a prompt that is computed here, and the token after it, if there will be one."""
        left = request.sampling.max_tokens - request.output_tokens
        return self._layout.pages_for(len(request.tokens) + (left > 1))

    @staticmethod
    def room_sampling(request: DecodeRequest) -> Sampling:
        """What its next room is asked for: the prompt's log probabilities once only."""
        if request.sampling.prompt_logprobs is None or request.awaits_scores:
            return request.sampling
        return msgspec.structs.replace(request.sampling, prompt_logprobs=None)

    def admitted(self, request: DecodeRequest, room: RoomId, now: float) -> None:
        """Its room has been opened."""
        assert self._queue[0] == request.request, request.request
        self._queue.popleft()
        request.state = RequestState.PREFILLING
        request.room = request.last_room = room
        request.end_phase("queued", now)

    def requeue(self, request: DecodeRequest, now: float) -> None:
        """Its room gave nothing, or it was preempted: it goes on first of all, in a new room."""
        assert request.state is not RequestState.QUEUED, request.request
        assert not request.is_in_step and not request.pages, request.request
        self._running.pop(request.request, None)
        is_prefilling = request.prefills_here or request.state is RequestState.PREFILLING
        phase = "prefill" if is_prefilling else "decode"
        request.end_phase(phase, now)
        request.state = RequestState.QUEUED
        request.room = None
        request.computed = 0
        request.end_prompt()
        self._queue.appendleft(request.request)

    def ready(
        self, request: DecodeRequest, pages: tuple[int, ...], computed: int, now: float
    ) -> None:
        """Its KV has landed: `computed` tokens in `pages`, and at least one more to feed."""
        assert request.state is RequestState.PREFILLING, request.state
        assert computed == len(request.tokens) - 1, (computed, len(request.tokens))
        self._run(request, pages, computed)
        request.end_phase("transfer", now)

    def begin_here(
        self,
        request: DecodeRequest,
        why: LocalReason,
        pages: tuple[int, ...],
        cached_tokens: int,
        now: float,
    ) -> None:
        """Its prompt is computed here, but for `cached_tokens` that were found in a cache and are
        in `pages` already."""
        assert self._queue[0] == request.request, request.request
        assert cached_tokens < len(request.tokens), (cached_tokens, len(request.tokens))
        assert len(pages) >= self.pages_here(request), (len(pages), len(request.tokens))
        self._queue.popleft()
        self._run(request, pages, cached_tokens)
        request.here = why
        if not request.output_tokens:
            request.cached_tokens = cached_tokens
        request.end_phase("queued", now)

    def _run(self, request: DecodeRequest, pages: tuple[int, ...], computed: int) -> None:
        assert self._layout.pages_for(computed) <= len(pages), (computed, len(pages))
        request.state = RequestState.RUNNING
        request.room = None
        request.pages, request.computed = pages, computed
        self._running[request.request] = request
        by_age = sorted(self._running.values(), key=lambda r: r.order)
        self._running = {r.request: r for r in by_age}

    # Steps

    def plan(self, pool: SequencePool, now: float) -> StepPlan:
        """The next step: one token of every sequence that can go on, oldest first, and parts of
        prompts. The step before is over, so anybody may be preempted."""
        sequences: list[DecodeRequest] = []
        prompts: list[DecodeRequest] = []
        preempted: list[DecodeRequest] = []
        for request in list(self._running.values()):
            assert not request.is_in_step, request.request
            if request.state is not RequestState.RUNNING or self._computable(request) <= 0:
                continue
            if request.prefills_here:
                prompts.append(request)
            elif self._grow(request, pool, preempted, now):
                request.step_tokens = 1
                sequences.append(request)
        parts = self._share_out(prompts, is_beside=bool(sequences)) if prompts else []
        prompt_tokens = sum(request.step_tokens for request in parts)
        tokens = len(sequences) + prompt_tokens
        return StepPlan((*sequences, *parts), tuple(preempted), tokens, prompt_tokens)

    def _share_out(self, prompts: list[DecodeRequest], *, is_beside: bool) -> list[DecodeRequest]:
        """Those of `prompts`, oldest first, that have a part in the step, and how much of it."""
        budget = self._limits.tokens_beside if is_beside else self._limits.tokens
        if any(request.awaits_scores for request in prompts):
            budget = min(budget, SCORED_TOKENS_MAX)
        counts = share_out(list(map(self._computable, prompts)), budget)
        for request, count in zip(prompts, counts, strict=True):
            request.step_tokens = count
        return [request for request in prompts if request.is_in_step]

    def grow_ahead(self, pool: SequencePool) -> None:
        """While a step runs: pages for the token after the one that it computes, as if all of its
        sequences went on. Nobody is preempted for them: the pages of the step are in use, and some
        of its sequences may end with it and give theirs back."""
        page_size = self._layout.page_size
        for request in self._running.values():
            is_covered = len(request.pages) * page_size >= request.computed + 2
            if is_covered or not request.is_in_step or self._ends_after(request):
                continue
            if not pool.available:
                return
            request.pages += tuple(pool.take(request, 1))

    def _grow(
        self,
        request: DecodeRequest,
        pool: SequencePool,
        preempted: list[DecodeRequest],
        now: float,
    ) -> bool:
        """Cover one more token; False when the request itself had to give way."""
        while len(request.pages) * self._layout.page_size <= request.computed:
            try:
                request.pages += tuple(pool.take(request, 1))
            except PoolExhausted:
                youngest = next(reversed(self._running.values()))
                pool.give_back(youngest)
                self.requeue(youngest, now)
                preempted.append(youngest)
                if youngest is request:
                    return False
        return True

    def _ends_after(self, request: DecodeRequest) -> bool:
        """The token that is being computed is its last one, whatever it turns out to be."""
        is_full = len(request.tokens) + 1 >= self._max_model_len
        return is_full or request.output_tokens + 1 >= request.sampling.max_tokens

    def stepped(self, request: DecodeRequest) -> None:
        """A step with this request in it is over: the KV of what it fed is in the pool."""
        request.computed += request.step_tokens
        self.step_failed(request)

    def step_failed(self, request: DecodeRequest) -> None:
        """A step with this request in it is over, and yielded nothing."""
        assert request.is_in_step, request.request
        request.step_tokens = 0

    def first_token(self, request: DecodeRequest, cached_tokens: int, now: float) -> None:
        """Its prefill has been computed; what is left of its room is the transfer."""
        assert request.state is RequestState.PREFILLING, request.state
        if not request.output_tokens:
            request.cached_tokens = cached_tokens
        request.end_phase("prefill", now)

    def prefilled_here(self, request: DecodeRequest, now: float) -> None:
        """All of its prompt has been computed by steps here."""
        assert request.prefills_here, request.request
        assert request.computed == len(request.tokens), (request.computed, len(request.tokens))
        request.end_prompt()
        request.end_phase("prefill", now)

    def take_token(self, request: DecodeRequest, token: int) -> FinishReason | None:
        """One more output token, from a step or from prefill; says whether it was the last."""
        request.tokens.append(token)
        sampling, output = request.sampling, request.output_tokens
        if output > sampling.min_tokens:
            is_eos = token in self._eos_token_ids and not sampling.ignore_eos
            if is_eos or token in sampling.stop_token_ids:
                return FinishReason.STOP
        if output >= sampling.max_tokens or len(request.tokens) >= self._max_model_len:
            return FinishReason.LENGTH
        return None

    def overdue(self, now: float) -> list[DecodeRequest]:
        """Requests whose deadline has passed."""
        return [r for r in self.requests.values() if now >= r.deadline]

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        queued = set(self._queue)
        assert len(queued) == len(self._queue)
        orders = [request.order for request in self._running.values()]
        assert orders == sorted(orders), orders
        for request in self.requests.values():
            is_queued = request.state is RequestState.QUEUED
            is_running = request.state is RequestState.RUNNING
            assert is_queued == (request.request in queued), request.request
            assert is_running == (request.request in self._running), request.request
            assert (request.room is not None) == (request.state is RequestState.PREFILLING)
            assert is_running or not request.pages, request.request
            assert is_running or not request.is_in_step, request.request
            assert is_running or not request.prefills_here, request.request
            assert request.is_in_step or request.ended is None, request.request
            if is_running:
                covered = request.computed + request.step_tokens
                assert self._layout.pages_for(covered) <= len(request.pages), request.request
