"""One connection of a sender to a decode rank: a thread that sends, and waits for the answers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdrt.errors import EngineError
from pdrt.kv.pool import KvPool
from pdrt.protocol.room_writer import WriteOutcome
from pdrt.transfer.tcp.memory import Stage, make_stage
from pdrt.transfer.tcp.outbox import Outbox, Piece
from pdrt.transfer.tcp.sockets import (
    limit,
    prepare,
    receive_exactly,
    send_all,
    shut_down,
    source_address,
)
from pdrt.transfer.tcp.wire import (
    ANSWER_BYTES,
    REPLY_BYTES,
    Greeted,
    Greeting,
    Malformed,
    pack_greeting,
    pack_head,
    unpack_answer,
    unpack_reply,
)
from pdrt.transfer.writable import Verdict

DIAL_SECONDS_MAX = 5.0
"""For a connection, and again for the reply."""
IDLE_SECONDS = 30.0
"""A connection that has had nothing to send for so long is closed, before something between the
hosts forgets it without a word. It is dialled again when there is something."""

_REFUSED = {
    Greeted.WRONG_TOKEN: "it does not know our token: another process has that port by now",
    Greeted.STALE: "it has retired that generation",
    Greeted.CROWDED: "it has as many connections as it may; give a smaller --tcp-connections",
}
_WHY = {
    Verdict.NO_ROOM: "the room is over there",
    Verdict.OTHER_PAIRING: "the room was granted to another worker, or on another generation",
    Verdict.OUTSIDE: "it does not lie in pages that the room may write",
}


class Address(NamedTuple):
    """Where to connect, and what to say first."""

    host: str
    port: int
    greeting: Greeting


Result = tuple[Piece, WriteOutcome, str]


def dial(address: Address) -> socket.socket:
    """A connection that the receiver has accepted.

    Raises:
        EngineError: it cannot be had; says why and what to do.
    """
    where = f"decode rank {address.greeting.rank} at {address.host}:{address.port}"
    try:
        connection = socket.create_connection((address.host, address.port), DIAL_SECONDS_MAX)
    except OSError as error:
        is_silent = isinstance(error, TimeoutError)
        why = f"no answer within {DIAL_SECONDS_MAX:g} s" if is_silent else error.strerror or error
        here = _our_address(address.host)
        raise EngineError(
            f"{where} cannot be reached from {here}: {why}; open TCP port {address.port} there to "
            f"{here} (the decode worker's --data-port chooses it), or give it a --host that is "
            "reached from here"
        ) from error
    try:
        prepare(connection)
        limit(connection, DIAL_SECONDS_MAX)
        connection.sendall(pack_greeting(address.greeting))
        reply = unpack_reply(receive_exactly(connection, REPLY_BYTES))
    except (OSError, Malformed) as error:
        connection.close()
        raise EngineError(f"{where} does not speak the tcp engine's protocol: {error}") from error
    if reply is not Greeted.ACCEPTED:
        connection.close()
        raise EngineError(f"{where} turned us away: {_REFUSED[reply]}")
    return connection


def _our_address(host: str) -> str:
    """The one from which `host` is reached, in words."""
    try:
        return source_address(host)
    except OSError:
        return "this host"


class Connection:
    """Takes from the outbox, on a thread of its own; `told` hears of what became of each piece."""

    def __init__(
        self,
        outbox: Outbox,
        pool: KvPool,
        write_seconds_max: float,
        told: Callable[[list[Result]], None],
    ) -> None:
        """`pool`: the sender's. `told` is called on this thread."""
        self.socket: socket.socket | None = None
        """Set once, when it is connected; closed by whoever owns the connection, after its end."""
        self._outbox = outbox
        self._pool = pool
        self._write_seconds_max = write_seconds_max
        self._told = told

    def run(self, connection: socket.socket) -> None:
        """Until the outbox has nothing more for it, or it breaks."""
        self.socket = connection
        limit(connection, self._write_seconds_max)
        stage = make_stage(self._pool)
        # A batch is sent before the answers to the one before it are waited for, so that the
        # receiver always has something to read.
        unanswered: list[Piece] = []
        while True:
            batch = self._outbox.take(0.0 if unanswered else IDLE_SECONDS)
            if not batch and not unanswered:
                return
            results = self._carry(connection, stage, batch, unanswered)
            if results:
                self._told(results)
                if results[-1][1] is WriteOutcome.UNSETTLED:
                    return
            unanswered = batch

    def hang_up(self) -> None:
        """From another thread: whatever it waits for fails."""
        if self.socket is not None:
            shut_down(self.socket)

    def _carry(
        self,
        connection: socket.socket,
        stage: Stage,
        batch: list[Piece],
        unanswered: list[Piece],
    ) -> list[Result]:
        """Send a batch, and wait for the answers to what was sent before. When the connection
        breaks, what has no answer is unsettled: it may have been taken, or still be on the way."""
        results: list[Result] = []
        try:
            for piece in batch:
                table = [(part.target_offset, part.length) for part in piece.ranges]
                head = pack_head(piece.write.room, table, is_last=piece is batch[-1])
                sources = [(part.source_offset, part.length) for part in piece.ranges]
                send_all(connection, [head, *stage.give(sources)])
            for piece, verdict in zip(unanswered, _answers(connection, unanswered), strict=True):
                results.append(_result(piece, verdict))
        except (OSError, Malformed) as error:
            why = self._words(error)
            left = unanswered[len(results) :] + batch
            results += [(piece, WriteOutcome.UNSETTLED, why) for piece in left]
        return results

    def _words(self, error: Exception) -> str:
        if isinstance(error, BlockingIOError):
            return f"no progress for {self._write_seconds_max:.0f} s"
        return f"the connection broke: {error}"


def _answers(connection: socket.socket, pieces: Sequence[Piece]) -> list[Verdict]:
    """Raises OSError, Malformed."""
    data = receive_exactly(connection, len(pieces) * ANSWER_BYTES)
    return [
        unpack_answer(data[start : start + ANSWER_BYTES])
        for start in range(0, len(data), ANSWER_BYTES)
    ]


def _result(piece: Piece, verdict: Verdict) -> Result:
    if verdict is Verdict.LANDED:
        return piece, WriteOutcome.COMPLETED, ""
    return piece, WriteOutcome.FAILED, f"refused by the receiver: {_WHY[verdict]}"
