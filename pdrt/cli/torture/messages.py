"""What a trial says to its parties, target and writers, and what they answer: JSON lines over
stdin and stdout, so that `ssh` carries them too."""

from __future__ import annotations

import msgspec

from pdrt.cli.torture.engines import End
from pdrt.ids import Incarnation, RoomId
from pdrt.protocol.messages import RankProcess, Segment

NURSE_MARK = b"!"
"""Begins lines that are to and from a party's nurse, which does to it what it cannot do itself."""


class Setup(msgspec.Struct, frozen=True, tag=True):
    """Make pool and engine. Answered with `Ready`."""

    end: End
    device: str
    pages: int
    seed: int = 0
    """Of the bytes that a writer's pages hold."""


class OpenSegment(msgspec.Struct, frozen=True, tag=True):
    """Target: expose the pool, with the means to fence its writer in hand, and admit a room to the
    pages `[first, first + count)`. `Opened`."""

    endpoint: str
    generation: int
    writer: RankProcess
    room: RoomId
    first: int
    count: int


class Fence(msgspec.Struct, frozen=True, tag=True):
    """Target: carry out the engine's fence. `Fenced`."""

    endpoint: str
    generation: int


class Reuse(msgspec.Struct, frozen=True, tag=True):
    """Target: give pages to a new owner, who fills them with zeros. `Done`."""

    first: int
    count: int


class Look(msgspec.Struct, frozen=True, tag=True):
    """Target: how many bytes of these pages are not zero. `Bytes`."""

    first: int
    count: int


class Compare(msgspec.Struct, frozen=True, tag=True):
    """Target: how many bytes are not those of a writer with this seed. `Bytes`."""

    first: int
    count: int
    seed: int


class OpenInstance(msgspec.Struct, frozen=True, tag=True):
    """Writer: reach the target's segment. `Done`."""

    decode: Incarnation
    generation: int
    segment: Segment


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Writer: write pages `[0, count)` of its own to `[first, first + count)`, over and over, with
    so many writes outstanding. `Done`."""

    room: RoomId
    generation: int
    first: int
    count: int
    outstanding: int


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Writer: `Tally`."""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Writer: submit nothing more; `Tally` once every write has had its answer."""


class CloseInstance(msgspec.Struct, frozen=True, tag=True):
    """Writer: `Done` once it is destroyed."""

    decode: Incarnation
    generation: int


Command = (
    Setup | OpenSegment | Fence | Reuse | Look | Compare
    | OpenInstance | Begin | Ask | Finish | CloseInstance
)  # fmt: skip


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Pool and engine are there."""

    incarnation: Incarnation
    process: RankProcess


class Opened(msgspec.Struct, frozen=True, tag=True):
    segment: Segment


class Fenced(msgspec.Struct, frozen=True, tag=True):
    seconds: float


class Bytes(msgspec.Struct, frozen=True, tag=True):
    count: int


class Tally(msgspec.Struct, frozen=True, tag=True):
    """How a writer's writes have ended so far."""

    completed: int = 0
    failed: int = 0
    unsettled: int = 0
    detail: str = ""
    """Of the first that did not complete."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """It is done."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """An error of the world, in words."""

    text: str


Answer = Ready | Opened | Fenced | Bytes | Tally | Done | Refused

_command: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
_answer: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def line_of(message: Command | Answer) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def command_of(line: bytes) -> Command:
    return _command.decode(line)


def answer_of(line: bytes) -> Answer:
    """Raises msgspec.MsgspecError for what is none, such as a library's own output."""
    return _answer.decode(line)
