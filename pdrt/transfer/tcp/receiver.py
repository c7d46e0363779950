"""The decode side of the `tcp` engine, on one rank: a listening socket, a thread per connection."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import threading
from collections import Counter
from typing import NamedTuple

import msgspec

from pdrt.errors import ConfigError
from pdrt.kv.pool import KvPool
from pdrt.protocol.messages import Segment
from pdrt.protocol.writers import FenceKind
from pdrt.transfer.slow_calls import tell
from pdrt.transfer.tcp import NAME
from pdrt.transfer.tcp.descriptor import TcpDescriptor
from pdrt.transfer.tcp.memory import Stage, make_stage
from pdrt.transfer.tcp.sockets import limit, prepare, receive_all, receive_exactly, shut_down
from pdrt.transfer.tcp.wire import (
    GREETING_BYTES,
    HEAD_BYTES,
    RANGE_BYTES,
    TOKEN_BYTES,
    Greeted,
    Greeting,
    Head,
    Malformed,
    pack_answers,
    pack_reply,
    unpack_greeting,
    unpack_head,
    unpack_ranges,
)
from pdrt.transfer.writable import Pairing, Verdict, WritableRooms

log = logging.getLogger(__name__)

GREETING_SECONDS_MAX = 5.0
"""A connection that says nothing for so long is closed."""
STRANGERS_MAX = 64
"""Connections that have not proved themselves yet. One more is closed at once."""
CONNECTIONS_MAX = 64
"""Of one segment: prefill ranks times connections. One more is closed at once."""
BACKLOG = 128
RETRY_SECONDS = 1.0
"""Until connections are accepted again, after one could not be."""
PIECES_MAX = 256
"""That a sender may send before it asks for their answers."""


class Place(NamedTuple):
    """Whose port it is, and where."""

    rank: int
    host: str
    """That it binds to."""
    shown_host: str
    """That peers dial."""
    port: int = 0
    """0: the system picks one."""


class TcpReceiver:
    """Serves every peer and generation of one rank through one port."""

    name = NAME
    fence = FenceKind.RETIRE_GENERATION

    def __init__(self, pool: KvPool, rooms: WritableRooms, place: Place) -> None:
        """Listens from now on. On the loop that serves it.

        Raises:
            ConfigError: it cannot be bound.
        """
        self.pool = pool
        self.rooms = rooms
        self.place = place
        self.refused: Counter[str] = Counter()
        """Connections that were turned away, by reason."""
        self.refused_pieces: Counter[str] = Counter()
        """Of writes, by verdict."""
        self.lock = threading.Lock()
        """Held to let a connection in, and to close a segment to new ones."""
        self.segments: dict[int, TcpSegment] = {}
        """Alive ones by serial."""
        self._serial = 0
        self._loop = asyncio.get_running_loop()
        self._connections: set[Connection] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._listener = _listen(place.host, place.port)
        self.port: int = self._listener.getsockname()[1]
        log.info("listens for KV", extra={"rank": place.rank, "endpoint": self.endpoint})
        self._loop.add_reader(self._listener.fileno(), self._accept)

    @property
    def endpoint(self) -> str:
        """What peers dial, as HOST:PORT."""
        return f"{self.place.shown_host}:{self.port}"

    async def open_segment(self, rank: int, endpoint: str, generation: int) -> Segment:
        """A new token. The memory is the same for all: what is let in differs."""
        assert rank == self.place.rank, (rank, self.place)
        self._serial += 1
        token = secrets.token_bytes(TOKEN_BYTES)
        self.segments[self._serial] = TcpSegment(self._serial, endpoint, generation, token)
        descriptor = TcpDescriptor(self.place.shown_host, self.port, self._serial, token)
        return Segment(rank=rank, engine=NAME, descriptor=msgspec.msgpack.encode(descriptor))

    async def close_segment(self, endpoint: str, generation: int) -> None:
        """The fence: nobody is let in any more, no further read begins, and those under way, one
        per connection at most, are waited for."""
        name = endpoint, generation
        [segment] = [x for x in self.segments.values() if (x.endpoint, x.generation) == name]
        with self.lock:
            segment.is_closed = True
        del self.segments[segment.serial]
        self.rooms.wake()
        for connection in segment.connections:
            connection.hang_up()
        while segment.connections:
            segment.changed.clear()
            await segment.changed.wait()

    async def close_offer(self, endpoint: str, generation: int) -> None:
        """In the same way: it costs nothing."""
        await self.close_segment(endpoint, generation)

    # Connections

    def _accept(self) -> None:
        try:
            accepted, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Out of descriptors, most likely. Who is in the backlog stays there meanwhile.
            log.warning("cannot accept a connection for KV; trying again", extra={"why": error})
            self._loop.remove_reader(self._listener.fileno())
            self._retry = self._loop.call_later(RETRY_SECONDS, self._listen_again)
            return
        strangers = sum(x.segment is None for x in self._connections)
        if strangers >= STRANGERS_MAX:
            accepted.close()
            self._turned_away("crowded", address)
            return
        connection = Connection(self, accepted, address)
        self._connections.add(connection)
        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _listen_again(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _serve(self, connection: Connection) -> None:
        """On the connection's own thread, to its end."""
        failure: Exception | None = None
        try:
            connection.run()
        except Exception as error:
            # Judged on the loop: what is no peer's doing ends the worker there.
            failure = error
        tell(self._loop, self._ended, connection, failure)

    def _ended(self, connection: Connection, failure: Exception | None) -> None:
        # Here alone, where nobody else can still be about to shut it down: its number is reused.
        connection.socket.close()
        self._connections.discard(connection)
        if connection.segment is not None:
            connection.segment.connections.discard(connection)
            connection.segment.changed.set()
        if isinstance(failure, Malformed):
            self._turned_away("malformed", connection.address, str(failure))
        elif failure is not None and not isinstance(failure, OSError):
            raise failure

    def turned_away(self, reason: Greeted, address: object) -> None:
        """From a connection's thread."""
        tell(self._loop, self._turned_away, reason.name.lower(), address)

    def _turned_away(self, reason: str, address: object, detail: str = "") -> None:
        self.refused[reason] += 1
        count = self.refused[reason]
        if count & (count - 1) == 0:  # ever more rarely: whoever reaches the port can cause it
            log.warning(
                "turned a connection for KV away",
                extra={"why": reason, "address": address, "detail": detail, "times": count},
            )

    def piece_refused(self, verdict: Verdict) -> None:
        """From a connection's thread."""
        tell(self._loop, self._piece_refused, verdict.name.lower())

    def _piece_refused(self, reason: str) -> None:
        self.refused_pieces[reason] += 1

    def close(self) -> None:
        """At exit."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for connection in self._connections:
            connection.hang_up()


class TcpSegment:
    """One generation of one prefill endpoint."""

    def __init__(self, serial: int, endpoint: str, generation: int, token: bytes) -> None:
        self.serial = serial
        self.endpoint = endpoint
        self.generation = generation
        self.token = token
        self.is_closed = False
        """Set by the loop; looked at by threads before every read."""
        self.connections: set[Connection] = set()
        """Let in, and not ended. Grows on their threads under the lock, shrinks on the loop."""
        self.changed = asyncio.Event()


class Connection:
    """One connection of a sender; everything but `hang_up` is its own thread's."""

    def __init__(self, receiver: TcpReceiver, accepted: socket.socket, address: object) -> None:
        self.socket = accepted
        self.address = address
        self.segment: TcpSegment | None = None
        """None: it has not proved itself."""
        self._pairing: Pairing
        self._receiver = receiver

    def hang_up(self) -> None:
        """On the loop: a read that waits ends, one that copies ends with what has arrived."""
        shut_down(self.socket)

    def run(self) -> None:
        """Until one side ends it.

        Raises:
            OSError: the connection broke.
            Malformed: it speaks something else.
        """
        prepare(self.socket)
        limit(self.socket, GREETING_SECONDS_MAX)
        greeting = unpack_greeting(receive_exactly(self.socket, GREETING_BYTES))
        reply = self._let_in(greeting)
        self.socket.sendall(pack_reply(reply))
        if reply is not Greeted.ACCEPTED:
            self._receiver.turned_away(reply, self.address)
            return
        limit(self.socket, 0)
        self._serve()

    def _let_in(self, greeting: Greeting) -> Greeted:
        receiver = self._receiver
        segment = receiver.segments.get(greeting.segment)
        if segment is None:
            return Greeted.STALE
        if not hmac.compare_digest(greeting.token, segment.token):
            return Greeted.WRONG_TOKEN
        if (greeting.rank, greeting.generation) != (receiver.place.rank, segment.generation):
            return Greeted.STALE
        with receiver.lock:
            if segment.is_closed:
                return Greeted.STALE
            if len(segment.connections) >= CONNECTIONS_MAX:
                return Greeted.CROWDED
            segment.connections.add(self)
            self.segment = segment
        self._pairing = Pairing(greeting.decode, segment.endpoint, segment.generation)
        return Greeted.ACCEPTED

    def _serve(self) -> None:
        segment = self.segment
        assert segment is not None
        stage = make_stage(self._receiver.pool)
        verdicts: list[Verdict] = []
        head_data = memoryview(bytearray(HEAD_BYTES))
        while not segment.is_closed:
            receive_all(self.socket, [head_data])
            head = unpack_head(head_data)
            ranges = unpack_ranges(head, receive_exactly(self.socket, head.ranges * RANGE_BYTES))
            verdicts.append(self._take(segment, stage, head, ranges))
            if head.is_last:
                self.socket.sendall(pack_answers(verdicts))
                verdicts.clear()
            elif len(verdicts) > PIECES_MAX:
                raise Malformed(f"{len(verdicts)} pieces without a last one")

    def _take(
        self, segment: TcpSegment, stage: Stage, head: Head, ranges: list[tuple[int, int]]
    ) -> Verdict:
        """Judge a piece, then read it to where it belongs; or past it."""
        rooms = self._receiver.rooms
        verdict = rooms.judge(head.room, self._pairing, ranges, lambda: segment.is_closed)
        if segment.is_closed:
            raise ConnectionAbortedError("the generation was retired")
        if verdict is Verdict.LANDED:
            stage.take(self.socket, ranges)
        else:
            self._receiver.piece_refused(verdict)
            receive_exactly(self.socket, head.length)
        return verdict


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        which, flags = (f"port {port}", "--data-port or --host") if port else ("a port", "--host")
        raise ConfigError(
            f"cannot bind {which} for KV on {host}: {error}; choose another {flags}"
        ) from error
    listener.setblocking(False)
    return listener
