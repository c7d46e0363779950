"""The prefill side of the `tcp` engine, on one rank."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial

from pdrt.errors import EngineError
from pdrt.ids import Incarnation
from pdrt.kv.pool import KvPool
from pdrt.protocol.messages import Segment
from pdrt.protocol.room_writer import WriteOutcome
from pdrt.transfer.engine import OnSettled, WriteRequest
from pdrt.transfer.sending import instance_for, route_for, shown_by
from pdrt.transfer.slow_calls import on_own_thread, tell
from pdrt.transfer.tcp import NAME
from pdrt.transfer.tcp.connection import Address, Connection, Result, dial
from pdrt.transfer.tcp.descriptor import TcpDescriptor
from pdrt.transfer.tcp.outbox import Outbox, Piece, Write, pieces_of
from pdrt.transfer.tcp.wire import Greeting

log = logging.getLogger(__name__)


class TcpSender:
    """One instance per decode incarnation and generation, with connections of its own."""

    name = NAME

    def __init__(self, pool: KvPool, connections: int, write_seconds_max: float) -> None:
        """`connections`: to each decode rank, at most."""
        self._pool = pool
        self._connections = connections
        self._write_seconds_max = write_seconds_max
        self.loop = asyncio.get_running_loop()
        self._instances: dict[tuple[Incarnation, int], _Instance] = {}

    async def open(self, decode: Incarnation, generation: int, segments: Sequence[Segment]) -> None:
        """Connect to every decode rank once; more connections are made when there is use for them.

        Raises:
            EngineError: one cannot be reached; says why and what to do.
        """
        assert (decode, generation) not in self._instances, (decode, generation)
        addresses = {x.rank: _address(x, decode, generation) for x in segments}
        dials = [on_own_thread(dial, address) for address in addresses.values()]
        dialled = await asyncio.gather(*dials, return_exceptions=True)
        failures = [x for x in dialled if isinstance(x, BaseException)]
        if failures:
            for connection in dialled:
                if isinstance(connection, socket.socket):
                    connection.close()
            raise failures[0]
        instance = _Instance()
        self._instances[decode, generation] = instance
        for (rank, address), connection in zip(addresses.items(), dialled, strict=True):
            assert isinstance(connection, socket.socket)
            instance.routes[rank] = route = _Route(self, instance, address)
            route.connect(partial(_as_it_is, connection))

    def make_connection(self, outbox: Outbox, told: Callable[[list[Result]], None]) -> Connection:
        return Connection(outbox, self._pool, self._write_seconds_max, told)

    @property
    def connections_max(self) -> int:
        """To one decode rank."""
        return self._connections

    def write(self, request: WriteRequest, on_settled: OnSettled) -> None:
        """Queue it for the connections to its decode rank.

        Raises:
            EngineError: not accepted.
        """
        instance = instance_for(self._instances, request)
        route = route_for(instance.routes, request)
        for piece in request.ranges:
            assert piece.length > 0, piece
            assert 0 <= piece.source_offset <= self._pool.size_bytes - piece.length, piece
        write = Write(request.room.serial, on_settled)
        route.send(pieces_of(write, request.ranges))

    async def close_instance(self, decode: Incarnation, generation: int) -> None:
        """Hang up, and wait for every thread to leave the pool."""
        instance = self._instances.pop((decode, generation), None)
        if instance is None:
            return
        instance.takes_writes = False
        for route in instance.routes.values():
            route.close()
        for route in instance.routes.values():
            await route.ended()

    def close(self) -> None:
        """At exit."""
        for instance in self._instances.values():
            for route in instance.routes.values():
                route.close()


class _Instance:
    """One generation of one decode incarnation."""

    def __init__(self) -> None:
        self.routes: dict[int, _Route] = {}
        """By decode rank."""
        self.takes_writes = True

    def taint(self) -> None:
        """Something never settled: nothing more is sent."""
        self.takes_writes = False
        for route in self.routes.values():
            route.fail_waiting("not sent: another write of its generation did not settle")


class _Route:
    """The way to one decode rank. On the loop."""

    def __init__(self, sender: TcpSender, instance: _Instance, address: Address) -> None:
        self._sender = sender
        self._instance = instance
        self._address = address
        self._outbox = Outbox(sender.connections_max)
        self._connections: set[Connection] = set()
        """Whose threads have not ended."""
        self._changed = asyncio.Event()

    def send(self, pieces: Sequence[Piece]) -> None:
        """They are outstanding from now on."""
        wanted = self._outbox.put(pieces)
        free = self._sender.connections_max - len(self._connections)
        for _ in range(min(wanted, free)):
            self.connect(lambda: dial(self._address))

    def connect(self, opens: Callable[[], socket.socket]) -> None:
        """One more connection; `opens` is called on its thread."""
        connection = self._sender.make_connection(self._outbox, self._told)
        self._connections.add(connection)
        threading.Thread(target=self._run, args=(connection, opens), daemon=True).start()

    def _run(self, connection: Connection, opens: Callable[[], socket.socket]) -> None:
        """The thread of one connection."""
        failure: Exception | None = None
        try:
            connection.run(opens())
        except Exception as error:
            # Judged on the loop: what is no peer's doing ends the worker there.
            failure = error
        tell(self._sender.loop, self._ended, connection, failure)

    def _told(self, results: list[Result]) -> None:
        tell(self._sender.loop, self._settle, results)

    def _settle(self, results: list[Result]) -> None:
        for piece, outcome, detail in results:
            piece.write.ended(outcome, detail)
        if any(outcome is WriteOutcome.UNSETTLED for _, outcome, _ in results):
            self._instance.taint()

    def _ended(self, connection: Connection, failure: Exception | None) -> None:
        if connection.socket is not None:
            # Here alone, where nobody else can still be about to shut it down.
            connection.socket.close()
        self._connections.discard(connection)
        self._changed.set()
        if failure is not None and not isinstance(failure, EngineError):
            raise failure
        if failure is None:
            # What came while it was ending, having been idle, found it still counted.
            self.send(())
        elif not self._connections:
            # Nothing of what waits was sent, and there is nobody left to send it.
            log.warning("cannot send KV", extra={"why": failure})
            self.fail_waiting(str(failure))

    def fail_waiting(self, why: str) -> None:
        """What no connection has taken has not begun."""
        for piece in self._outbox.withdraw():
            piece.write.ended(WriteOutcome.FAILED, why)

    def close(self) -> None:
        for piece in self._outbox.close():
            piece.write.ended(WriteOutcome.FAILED, "the engine is being closed")
        for connection in self._connections:
            connection.hang_up()

    async def ended(self) -> None:
        """Returns once no thread reads from the pool for it any more."""
        while self._connections:
            self._changed.clear()
            await self._changed.wait()


def _as_it_is(connection: socket.socket) -> socket.socket:
    """Of a connection that is there already."""
    return connection


def _address(segment: Segment, decode: Incarnation, generation: int) -> Address:
    shown: TcpDescriptor = shown_by(segment, NAME, TcpDescriptor)
    greeting = Greeting(shown.token, shown.segment, decode, segment.rank, generation)
    return Address(shown.host, shown.port, greeting)
