"""Answering one request of a client, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Send

from pdrt.gateway.choice import Choice
from pdrt.gateway.effects import Ended
from pdrt.gateway.errors import ApiError, invalid, overloaded, unavailable
from pdrt.gateway.events import EventWriter, names, served_by
from pdrt.gateway.http import JsonResponse
from pdrt.gateway.hub import Hub
from pdrt.gateway.responses import DONE, Head, Usage, WholeChoice
from pdrt.gateway.stream import Outputs, OutputStream, Received
from pdrt.ids import short
from pdrt.observe.http_server import DirectBody
from pdrt.observe.tracing import Span
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.sampling import TokenLogprobs

log = logging.getLogger("pdrt.gateway")

LINGER_SECONDS = 5.0
"""A client that has not read its last words so long after the deadline loses its connection."""
INLINE_ITEMS_MAX = 2048
"""More tokens and log probabilities at once (some milliseconds) are worked on beside the loop."""
TOKENS_AT_ONCE = 256
"""Of all choices: then others have a turn. A client that does not read has so many waiting for it
in every one of its streams."""

Beside = Callable[[Callable[[], bytes]], Awaitable[bytes]]
"""Runs a function in a thread."""


class Job(msgspec.Struct, frozen=True):
    """A request that is ready to run."""

    id: str
    """For logs."""
    choices: tuple[Choice, ...]
    """By index; at least one, all with the same deadline."""
    head: Head
    include_usage: bool
    span: Span
    """Of the whole request."""

    @property
    def deadline(self) -> float:
        return self.choices[0].plan.submission.deadline


class _Ending(msgspec.Struct, frozen=True):
    outcome: str
    """Label of `pdrt_requests_total`, for choices that are not complete."""
    error: ApiError | None = None


_COMPLETE = _Ending("complete")
_CLIENT_GONE = _Ending("client_gone")
_STALLED = _Ending("stalled")

Emit = Callable[[bytes], Awaitable[None]]


class Answer:
    """Runs one job, once. Whatever happens, upstream stops when the answer does."""

    def __init__(self, hub: Hub, job: Job, beside: Beside) -> None:
        self._hub = hub
        self._job = job
        self._beside = beside
        self._outputs = Outputs()
        self._by_serial: dict[int, Choice] = {}

    async def whole(self, receive: Receive) -> Response:
        """The response in one piece. Raises `ApiError`."""

        async def keep(data: bytes) -> None:
            assert not data

        ending = await self._run(receive, lambda: self._consume(keep))
        if ending.error is not None:
            raise ending.error
        if ending is not _COMPLETE:
            return Response(status_code=499)  # the client is gone: nobody reads it
        items = sum(choice.logprobs + choice.tokens for choice in self._job.choices)
        body = await self._work(items, self._whole_body)
        return JsonResponse(body, headers=served_by(self._job.choices))

    def _whole_body(self) -> bytes:
        bodies: list[bytes] = []
        rest: dict[str, Any] = {}
        for choice in self._job.choices:
            assert isinstance(choice.renderer, WholeChoice)
            bodies.append(choice.renderer.encode())
            rest |= choice.renderer.of_prompt(choice.plan.submission.token_ids)
        return self._job.head.whole(bodies, self._usage(), rest)

    async def _work(self, items: int, work: Callable[[], bytes]) -> bytes:
        """Some of it takes long."""
        return work() if items <= INLINE_ITEMS_MAX else await self._beside(work)

    async def events(self, receive: Receive, send: Send, direct: DirectBody | None = None) -> None:
        """The response as server-sent events.

        Raises `ApiError` while nothing is sent yet; after that an error is an event.
        """
        writer = EventWriter(send, direct, self._job.choices)

        async def write() -> _Ending:
            ending = await self._consume(writer.emit)
            if ending.error is not None or ending is _COMPLETE:
                usage = b""
                if self._job.include_usage and ending.error is None:
                    usage = self._job.head.usage_event(self._usage())
                await writer.finish(ending.error, usage + DONE)
            return ending

        ending = await self._run(receive, write)
        if ending.error is not None and not writer.is_started:
            raise ending.error

    async def _run(
        self, receive: Receive, work: Callable[[], Coroutine[None, None, _Ending]]
    ) -> _Ending:
        """Begin the requests, do `work` while watching for the client's disconnect, then close
        them."""
        ending = _Ending("failed")
        seconds_max = self._job.deadline - self._hub.clock() + LINGER_SECONDS
        if not self._hub.reserve(len(self._job.choices)):
            raise overloaded("too many requests are in flight already")
        self._open(self._job.choices[0])
        try:
            async with asyncio.timeout(seconds_max), asyncio.TaskGroup() as group:
                watcher = group.create_task(self._watch(receive))
                await self._open_others()
                # A task of its own: this one would be resumed layer by layer, once per token.
                ending = await group.create_task(work())
                watcher.cancel()
        except TimeoutError:
            ending = _STALLED
        finally:
            self._close(ending)
        return ending

    def _open(self, choice: Choice) -> None:
        choice.stream = self._hub.open(choice.plan.submission, self._outputs)
        self._by_serial[choice.stream.serial] = choice

    async def _open_others(self) -> None:
        """One at a turn of the loop: each is routed and sent, some milliseconds for a long
        prompt."""
        for choice in self._job.choices[1:]:
            await asyncio.sleep(0)
            if self._outputs.client_gone:
                return
            self._open(choice)

    def _close(self, ending: _Ending) -> None:
        choices = self._job.choices
        self._hub.release(sum(choice.stream is None for choice in choices))
        for choice in choices:
            if choice.stream is not None:
                self._hub.close(choice.stream, choice.finished_by or ending.outcome)
        self._log(ending)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        for choice in self._job.choices:
            if choice.stream is not None:
                self._hub.abandon(choice.stream, "client_gone")
        self._outputs.note_client_gone()

    async def _consume(self, emit: Emit) -> _Ending:
        """Pass on what is new until every choice is complete. Tokens are credited once `emit` is
        back."""
        running = len(self._job.choices)
        while running:
            news = await self._outputs.receive()
            if self._outputs.client_gone:
                return _CLIENT_GONE
            data: list[bytes] = []
            failed: _Ending | None = None
            tokens = 0
            for stream in news:
                choice = self._by_serial[stream.serial]
                if choice.finished_by is not None:
                    continue
                before = choice.tokens_taken
                received = stream.take()
                if received.prompt_logprobs is not None:
                    data.append(await self._of_prompt(choice, received.prompt_logprobs))
                failed = self._advance(choice, stream, received, data)
                if failed is not None:
                    break
                running -= choice.finished_by is not None
                tokens += choice.tokens_taken - before
                if tokens >= TOKENS_AT_ONCE:
                    await emit(b"".join(data))
                    await asyncio.sleep(0)
                    data, tokens = [], 0
            if data:
                await emit(b"".join(data))
            if failed is not None:
                return failed
            for stream in news:
                self._hub.take(stream, self._by_serial[stream.serial].tokens_taken)
        return _COMPLETE

    async def _of_prompt(self, choice: Choice, scores: tuple[TokenLogprobs, ...]) -> bytes:
        begin = functools.partial(choice.push_prompt, scores)
        return await self._work(choice.prompt_logprobs, begin)

    def _advance(
        self, choice: Choice, stream: OutputStream, received: Received, data: list[bytes]
    ) -> _Ending | None:
        """What is new of one choice's tokens, and its end, is added to `data`; how all of them end,
        if this one failed."""
        if received.token_ids:
            data.append(choice.push(received))
            choice.tokens_taken += len(received.token_ids)
            if choice.is_stopped:
                self._hub.abandon(stream, "stop_string")
                return None
        if received.ended is not None:
            match received.ended.reason:
                case FinishReason.STOP:
                    data.append(choice.finish("stop"))
                case FinishReason.LENGTH:
                    data.append(choice.finish("length"))
                case reason:
                    return _Ending(reason.value, self._error(choice, received.ended))
        return None

    def _error(self, choice: Choice, ended: Ended) -> ApiError:
        stream = choice.stream
        assert stream is not None
        which = f"Choice {choice.plan.index}: " if len(self._job.choices) > 1 else ""
        match ended.reason:
            case FinishReason.REJECTED:
                detail = ended.detail or "The request was rejected"
                return invalid(which + detail, choice.plan.blamed(detail), "rejected")
            case FinishReason.OVERLOADED:
                return overloaded(which + (ended.detail or "The workers are busy"))
            case FinishReason.DEADLINE:
                detail = ended.detail or "The request took too long"
                return ApiError(504, which + detail, code="timeout")
            case FinishReason.UNAVAILABLE:
                reasons = [] if stream.decodes else self._hub.readiness()[1]
                why = ended.detail or "No worker can serve this request now"
                detail = ": ".join([why, "; ".join(reasons)]).rstrip(": ")
                seconds = self._hub.registry.retry_after_seconds(self._hub.clock())
                return unavailable(which + detail, seconds)
            case _:
                return ApiError(500, which + (ended.detail or "The request failed"), code="failed")

    def _usage(self) -> Usage:
        """Of all choices. A prompt counts once; of its choices' cached tokens, the fewest: the
        others were computed for it."""
        prompts: dict[int, Usage] = {}
        completion_tokens = 0
        for choice in self._job.choices:
            usage = choice.usage()
            completion_tokens += usage.completion_tokens
            known = prompts.get(choice.plan.prompt_index)
            if known is None or usage.cached_tokens < known.cached_tokens:
                prompts[choice.plan.prompt_index] = usage
        return Usage(
            sum(usage.prompt_tokens for usage in prompts.values()),
            completion_tokens,
            sum(usage.cached_tokens for usage in prompts.values()),
        )

    def _log(self, ending: _Ending) -> None:
        """To the log, the metrics and the trace."""
        choices = self._job.choices
        first, usage = choices[0], self._usage()
        stream = first.stream
        assert stream is not None
        now, metrics = self._hub.clock(), self._hub.metrics
        ttft = None if stream.first is None else round(stream.first - stream.opened, 4)
        outcome = str(ending.outcome if ending is not _COMPLETE else first.finished_by)
        facts: dict[str, object] = {
            "request_id": self._job.id,
            "outcome": outcome,
            "request": f"{short(self._hub.incarnation)}/{stream.serial}",
            "prompt_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "ttft_seconds": ttft,
            "seconds": round(now - stream.opened, 4),
            "decodes": names(c.stream.decodes for c in choices if c.stream is not None),
        }
        if len(choices) > 1:
            facts["choices"] = len(choices)
        log.info("request ended", extra=facts)
        metrics.observe_request(now - stream.opened)
        metrics.count_prompt_tokens(usage.prompt_tokens)
        metrics.count_cached_tokens(usage.cached_tokens)
        attributes: dict[str, str | int | float | bool] = {
            "pdrt.request_id": self._job.id,
            "pdrt.model": self._job.head.model,
            "pdrt.outcome": outcome,
            "pdrt.prompt_tokens": usage.prompt_tokens,
            "pdrt.output_tokens": usage.completion_tokens,
            "pdrt.cached_tokens": usage.cached_tokens,
        }
        if ttft is not None:
            attributes["pdrt.ttft_seconds"] = ttft
        self._job.span.end(now, attributes)
