"""The ordered channel between a worker's leader and one of its other ranks: a pair of connected
Unix sockets, inherited at spawn, so that nobody else can ever speak on it.

A frame is its length (4 bytes, little endian) and a msgspec message. Sends never block the loop:
what the socket does not take waits here, up to a bound. Whatever goes wrong loses the channel,
once, and with it the worker.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

Inbound = TypeVar("Inbound")

LENGTH = struct.Struct("<I")
FRAME_BYTES_MAX = 64 * 2**20
"""Four times what workers may send each other: a prompt's checksums, a step's page tables."""
OUTBOX_BYTES_MAX = 2 * FRAME_BYTES_MAX
"""Waiting to be read by a peer that has stopped reading; its silence ends the worker earlier."""
READ_BYTES = 256 * 1024
READS_PER_TURN = 16
"""Before other callbacks of the loop get their turn."""

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """One frame."""
    body = _encoder.encode(message)
    assert len(body) <= FRAME_BYTES_MAX, (type(message).__name__, len(body))
    return LENGTH.pack(len(body)) + body


class RankChannel(Generic[Inbound]):
    """One end of it. Used on the loop only."""

    def __init__(
        self,
        end: socket.socket,
        union: Any,
        on_message: Callable[[Inbound], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Owns `end` from now on. `union`: of the messages expected. `on_lost(why)`: nothing comes
        or goes any more; at most once, and never after `close`."""
        end.setblocking(False)
        self._end = end
        self._decoder: msgspec.msgpack.Decoder[Inbound] = msgspec.msgpack.Decoder(union)
        self._on_message = on_message
        self._on_lost = on_lost
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._is_open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end, self._read_some)

    def send(self, frame: bytes) -> None:
        """Queue one frame of `encode`; dropped once the channel is lost."""
        if not self._is_open:
            return
        if not self._outbox:
            frame = frame[self._write(frame) :]
            if not frame or not self._is_open:
                return
            self._loop.add_writer(self._end, self._write_on)
        self._outbox += frame
        if len(self._outbox) > OUTBOX_BYTES_MAX:
            self._lose(f"{len(self._outbox)} bytes wait to be read")

    def _write(self, data: bytes | bytearray) -> int:
        """How much of it the socket takes now."""
        try:
            return self._end.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._lose(f"its channel broke: {error.strerror}")
            return 0

    def _write_on(self) -> None:
        del self._outbox[: self._write(self._outbox)]
        if self._is_open and not self._outbox:
            self._loop.remove_writer(self._end)

    def _read_some(self) -> None:
        for _ in range(READS_PER_TURN):
            if not self._read():
                return

    def drain(self) -> None:
        """Dispatch everything that has arrived, up to the largest frame."""
        for _ in range(FRAME_BYTES_MAX // READ_BYTES):
            if not self._read():
                return

    def _read(self) -> bool:
        """True if there may be more."""
        if not self._is_open:
            return False
        try:
            data = self._end.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose(f"its channel broke: {error.strerror}")
            return False
        if not data:
            self._lose("it has closed its channel")
            return False
        self._inbox += data
        self._dispatch()
        return True

    def _dispatch(self) -> None:
        while self._is_open and (body := self._next_frame()) is not None:
            try:
                message = self._decoder.decode(body)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                self._lose(f"it said what is no message: {error}")
                return
            self._on_message(message)

    def _next_frame(self) -> bytes | None:
        if len(self._inbox) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._inbox)
        if length > FRAME_BYTES_MAX:
            self._lose(f"it announced a frame of {length} bytes, {FRAME_BYTES_MAX} are allowed")
            return None
        end = LENGTH.size + length
        if len(self._inbox) < end:
            return None
        body = bytes(memoryview(self._inbox)[LENGTH.size : end])
        del self._inbox[:end]
        return body

    def _lose(self, why: str) -> None:
        if self._is_open:
            self.close()
            self._on_lost(why)

    def close(self) -> None:
        """Idempotent. What waits to be written is dropped."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._end)
        self._loop.remove_writer(self._end)
        self._end.close()
