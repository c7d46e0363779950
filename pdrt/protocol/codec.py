"""Frames: one msgpack-encoded message behind a version byte. Typed, bounded, never pickle."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from pdrt.protocol.messages import PROTOCOL_VERSION

Message = TypeVar("Message")


class BadFrame(Exception):
    """A frame that is not a message. `reason` is a metric label: `size`, `version`, `content`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


TOKEN_LOGPROBS_BYTES = 18
"""Of one `TokenLogprobs` in a frame, without the likely ones: array heads, a float, a rank."""
LIKELY_LOGPROB_BYTES = 15
"""Of one token in its `top`: array head, an id, a float."""
PAGE_CHECKSUM_BYTES = 9
"""Of one page's checksum in a frame."""
FRAME_REST_BYTES = 4096
"""What a frame with log probabilities of a prompt holds beside them, or less."""

_VERSION = bytes([PROTOCOL_VERSION])
VERSION_FRAME = _VERSION
"""No message: answers a frame of another version, whose sender learns from it which one is spoken
here. The version byte comes first in every one of them."""
_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """One frame."""
    return _VERSION + _encoder.encode(message)


def other_version(frame: bytes) -> str | None:
    """Words for a frame of another version, naming both; None for one of ours."""
    if frame[:1] == _VERSION:
        return None
    theirs = frame[0] if frame else "missing"
    return f"protocol version {theirs}, here is {PROTOCOL_VERSION}"


def prompt_logprobs_bytes(tokens: int, top: int) -> int:
    """Of the log probabilities of a prompt, in a frame, at most."""
    return tokens * (TOKEN_LOGPROBS_BYTES + top * LIKELY_LOGPROB_BYTES)


class Decoder(Generic[Message]):
    """Decodes the frames of one direction of one channel."""

    def __init__(self, union: Any, frame_bytes_max: int) -> None:
        """`union` is one of the message unions, e.g. `DecodeToPrefill`."""
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(union)
        self._frame_bytes_max = frame_bytes_max

    def decode(self, frame: bytes) -> Message:
        """The message in `frame`.

        Raises:
            BadFrame: too large, of another protocol version, or not a message of this union.
        """
        if len(frame) > self._frame_bytes_max:
            raise BadFrame("size", f"{len(frame)} bytes, {self._frame_bytes_max} allowed")
        if (difference := other_version(frame)) is not None:
            raise BadFrame("version", difference)
        try:
            return self._decoder.decode(memoryview(frame)[1:])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadFrame("content", str(error)) from error
