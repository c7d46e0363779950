"""Answering one completion request, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Send

from pdrt.gateway.effects import Ended, Submission
from pdrt.gateway.errors import ApiError, invalid, overloaded, unavailable
from pdrt.gateway.http import JsonResponse
from pdrt.gateway.hub import Hub
from pdrt.gateway.responses import DONE, Bodies, Usage, error_event
from pdrt.gateway.stream import Outputs, OutputStream
from pdrt.gateway.text import TextAssembler
from pdrt.ids import short
from pdrt.protocol.gateway_messages import FinishReason

log = logging.getLogger("pdrt.gateway")

LINGER_SECONDS = 5.0
"""A client that has not read its last words so long after the deadline loses its connection."""


class Job(msgspec.Struct, frozen=True):
    """A request that is ready to run."""

    id: str
    """For logs."""
    submission: Submission
    bodies: Bodies
    include_usage: bool


class _Ending(msgspec.Struct, frozen=True):
    outcome: str
    """Label of `pdrt_requests_total`."""
    finish_reason: str | None = None
    text: str = ""
    """The last piece."""
    error: ApiError | None = None


_CLIENT_GONE = _Ending("client_gone")
_STALLED = _Ending("stalled")


class _EventWriter:
    """The events of one response. `send` returns once the connection's buffer is below its high
    water mark, so awaiting it is what makes us as slow as the client."""

    def __init__(self, send: Send, bodies: Bodies, stream: OutputStream) -> None:
        self._send = send
        self._bodies = bodies
        self._stream = stream
        self.is_started = False

    async def emit(self, text: str) -> None:
        """Text, which may be empty; the first call starts the response."""
        data = self._bodies.text(text) if text else b""
        if not self.is_started:
            self.is_started = True
            await self._send(_event_stream_start(self._stream))
            data = self._bodies.first() + data
        if data:
            await self._write(data, more=True)

    async def finish(self, ending: _Ending, usage: Usage | None) -> None:
        """The end of the stream; nothing, when it failed before it began."""
        if ending.error is not None:
            if self.is_started:
                await self._write(error_event(ending.error), more=False)
            return
        assert ending.finish_reason is not None
        await self.emit(ending.text)
        tail = self._bodies.last(ending.finish_reason)
        if usage is not None:
            tail += self._bodies.usage(usage)
        await self._write(tail + DONE, more=False)

    async def _write(self, data: bytes, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class Answer:
    """Runs one job, once. Whatever happens, upstream stops when the answer does."""

    def __init__(self, hub: Hub, job: Job, text: TextAssembler) -> None:
        self._hub = hub
        self._job = job
        self._text = text
        self._outputs = Outputs()

    async def whole(self, receive: Receive) -> Response:
        """The response in one piece. Raises `ApiError`."""
        stream = self._hub.open(self._job.submission, self._outputs)
        pieces: list[str] = []

        async def keep(text: str) -> None:
            pieces.append(text)

        ending = await self._guard(stream, receive, self._consume(stream, keep))
        if ending.error is not None:
            raise ending.error
        if ending.finish_reason is None:
            return Response(status_code=499)  # the client is gone: nobody reads it
        text = "".join(pieces) + ending.text
        body = self._job.bodies.whole(text, ending.finish_reason, self._usage(stream))
        return JsonResponse(body, headers=_served_by(stream))

    async def events(self, receive: Receive, send: Send) -> None:
        """Send the response as server-sent events. Raises `ApiError` before the first one."""
        stream = self._hub.open(self._job.submission, self._outputs)
        writer = _EventWriter(send, self._job.bodies, stream)

        async def write() -> _Ending:
            ending = await self._consume(stream, writer.emit)
            if ending is not _CLIENT_GONE:
                usage = self._usage(stream) if self._job.include_usage else None
                await writer.finish(ending, usage)
            return ending

        ending = await self._guard(stream, receive, write())
        if ending.error is not None and not writer.is_started:
            raise ending.error

    async def _guard(
        self, stream: OutputStream, receive: Receive, work: Awaitable[_Ending]
    ) -> _Ending:
        """Do `work` while watching for the client's disconnect, then close the stream."""
        ending = _Ending("failed")
        seconds_max = self._job.submission.deadline - self._hub.clock() + LINGER_SECONDS
        try:
            async with asyncio.timeout(seconds_max), asyncio.TaskGroup() as group:
                watcher = group.create_task(self._watch(stream, receive))
                ending = await work
                watcher.cancel()
        except TimeoutError:
            ending = _STALLED
        finally:
            self._hub.close(stream, ending.outcome)
            self._log(stream, ending)
        return ending

    async def _watch(self, stream: OutputStream, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._hub.abandon(stream, "client_gone")
        self._outputs.note_client_gone()

    async def _consume(
        self, stream: OutputStream, emit: Callable[[str], Awaitable[None]]
    ) -> _Ending:
        """Pass text to `emit` until the output ends. Tokens are credited once `emit` is back."""
        tokens_taken = 0
        while True:
            await self._outputs.receive()
            if self._outputs.client_gone:
                return _CLIENT_GONE
            received = stream.take()
            text = self._text.push(received.token_ids)
            if self._text.stopped:
                self._hub.abandon(stream, "stop_string")
                return _Ending("stop", "stop", text)
            if received.token_ids:
                await emit(text)
                tokens_taken += len(received.token_ids)
                self._hub.take(stream, tokens_taken)
            if received.ended is not None:
                return self._end(stream, received.ended)

    def _end(self, stream: OutputStream, ended: Ended) -> _Ending:
        outcome = ended.reason.value
        if ended.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return _Ending(outcome, error=self._error(stream, ended))
        text = self._text.finish()
        if self._text.stopped:
            outcome = FinishReason.STOP.value
        return _Ending(outcome, outcome, text)

    def _error(self, stream: OutputStream, ended: Ended) -> ApiError:
        match ended.reason:
            case FinishReason.REJECTED:
                return invalid(ended.detail or "The request was rejected", None, "rejected")
            case FinishReason.OVERLOADED:
                return overloaded(ended.detail or "The workers are busy")
            case FinishReason.DEADLINE:
                detail = ended.detail or "The request took too long"
                return ApiError(504, detail, code="timeout")
            case FinishReason.UNAVAILABLE:
                reasons = [] if stream.decodes else self._hub.readiness()[1]
                return unavailable(": ".join([ended.detail, "; ".join(reasons)]).rstrip(": "))
            case _:
                return ApiError(500, ended.detail or "The request failed", code="failed")

    def _usage(self, stream: OutputStream) -> Usage:
        prompt_tokens = len(self._job.submission.token_ids)
        return Usage(prompt_tokens, self._text.tokens, stream.cached_tokens)

    def _log(self, stream: OutputStream, ending: _Ending) -> None:
        ttft = None if stream.first is None else round(stream.first - stream.opened, 4)
        facts = {
            "request": f"{short(self._hub.incarnation)}/{stream.serial}",
            "prompt_tokens": len(self._job.submission.token_ids),
            "output_tokens": self._text.tokens,
            "cached_tokens": stream.cached_tokens,
            "ttft_seconds": ttft,
            "seconds": round(self._hub.clock() - stream.opened, 4),
            "decodes": ",".join(short(decode) for decode in stream.decodes),
        }
        log.info("request %s %s", self._job.id, ending.outcome, extra=facts)


def _served_by(stream: OutputStream) -> dict[str, str]:
    return {"x-pdrt-decode": ",".join(short(decode) for decode in stream.decodes)}


def _event_stream_start(stream: OutputStream) -> dict[str, object]:
    headers = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",  # nginx would hold events back
        **_served_by(stream),
    }
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": raw}
