"""How an answer is sent: its headers, and server-sent events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from starlette.types import Send

from pdrt.gateway.choice import Choice
from pdrt.gateway.errors import ApiError
from pdrt.gateway.responses import error_event
from pdrt.ids import Incarnation, short
from pdrt.observe.http_server import DirectBody


class EventWriter:
    """The events of one response. `send` returns once the connection's buffer is below its high
    water mark, so awaiting it is what makes us as slow as the client; `direct` is open while it is
    below."""

    def __init__(self, send: Send, direct: DirectBody | None, choices: Sequence[Choice]) -> None:
        """`direct`: None where the server has none."""
        self._send = send
        self._direct = direct
        self._choices = choices
        self.is_started = False

    async def emit(self, data: bytes) -> None:
        """Events, which may be none; the first call starts the response."""
        if self._direct is not None and self._direct.is_open:
            if data:
                self._direct.write(data)
            return
        if not self.is_started:
            self.is_started = True
            await self._send(_event_stream_start(self._choices))
        if data:
            await self._write(data, more=True)

    async def finish(self, error: ApiError | None, tail: bytes) -> None:
        """The end of the stream; nothing, when it failed before it began."""
        if error is None:
            await self._write(tail, more=False)
        elif self.is_started:
            await self._write(error_event(error), more=False)

    async def _write(self, data: bytes, more: bool) -> None:
        if self._direct is not None:
            self._direct.flush()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def names(workers: Iterable[Sequence[Incarnation]]) -> str:
    """Each once, in order."""
    return ",".join(dict.fromkeys(short(one) for some in workers for one in some))


def served_by(choices: Sequence[Choice]) -> dict[str, str]:
    """Headers that name the workers."""
    streams = [choice.stream for choice in choices if choice.stream is not None]
    headers = {"x-pdrt-decode": names(stream.decodes for stream in streams)}
    if prefills := names(stream.prefills for stream in streams):
        headers["x-pdrt-prefill"] = prefills
    return headers


def _event_stream_start(choices: Sequence[Choice]) -> dict[str, object]:
    headers = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",  # nginx would hold events back
        **served_by(choices),
    }
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": raw}
