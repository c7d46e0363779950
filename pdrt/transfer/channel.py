"""ZeroMQ sockets on an asyncio loop: frames come in by callback, sends never block.

libzmq signals a socket's descriptor on changes only, so whoever touches the socket must look at
it again afterwards; `drain` reads all there is, for callers about to judge a peer's silence.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

import zmq

from pdrt.errors import ConfigError

FRAMES_PER_TURN = 256
"""Frames dispatched before other callbacks of the loop get their turn."""
QUEUE_FRAMES_MAX = 8192
"""Per peer and direction: twice the rooms of a worker; beyond it a send is refused."""
CLOSE_MS = 1000
"""What was said last still leaves after `close`, in libzmq's own thread, for this long."""
HEARTBEAT_MS = 1000
"""libzmq's own heartbeat: a connection that is half open is dropped and dialled again."""


class _Socket:
    """What both kinds share: bounds, reading, closing."""

    def __init__(self, kind: int, frame_bytes_max: int) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        for option, value in (
            (zmq.LINGER, CLOSE_MS),
            (zmq.SNDHWM, QUEUE_FRAMES_MAX),
            (zmq.RCVHWM, QUEUE_FRAMES_MAX),
            # Larger ones cost the sender its connection before they cost us memory.
            (zmq.MAXMSGSIZE, 2 * frame_bytes_max),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, 5 * HEARTBEAT_MS),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 1000),
        ):
            self._socket.setsockopt(option, value)

    def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_read_due = False
        self._loop.add_reader(self._socket.FD, self._read_some)
        self._read_soon()

    def _read_soon(self) -> None:
        """In the next turn of the loop, once however often this is called until then."""
        if not self._is_read_due:
            self._is_read_due = True
            self._loop.call_soon(self._read_some)

    def _dispatch(self, parts: list[bytes]) -> None:
        raise NotImplementedError

    def _receive(self) -> list[bytes] | None:
        if self._socket.closed:
            return None
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _read_some(self) -> None:
        self._is_read_due = False
        for _ in range(FRAMES_PER_TURN):
            parts = self._receive()
            if parts is None:
                return
            self._dispatch(parts)
        self._read_soon()

    def drain(self) -> None:
        """Dispatch everything that has arrived, up to what the queue can hold."""
        for _ in range(QUEUE_FRAMES_MAX):
            parts = self._receive()
            if parts is None:
                return
            self._dispatch(parts)

    def _send(self, frame: bytes, routing_id: bytes | None = None) -> bool:
        if self._socket.closed:
            return False
        try:
            if routing_id is not None:
                self._socket.send(routing_id, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        finally:
            # Sending may have swallowed the edge that announces inbound frames.
            self._read_soon()
        return True

    def close(self) -> None:
        """Read nothing more; what is queued is sent meanwhile, if somebody takes it. Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
            self._socket.close()


class RouterChannel(_Socket):
    """A bound ROUTER. Replies go to a routing id, never to "whoever spoke last"."""

    def __init__(
        self,
        host: str,
        port: int,
        on_frame: Callable[[bytes, bytes], None],
        frame_bytes_max: int,
        port_flag: str = "--port",
    ) -> None:
        """Bind to `host`:`port` (0 picks a port); `on_frame(routing_id, frame)` per frame.

        A multipart message of another shape arrives as one empty frame, which no decoder takes.

        Raises:
            ConfigError: the address cannot be bound; names it and `port_flag`.
        """
        super().__init__(zmq.ROUTER, frame_bytes_max)
        self._on_frame = on_frame
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self._socket.bind(f"tcp://{host}:{port}" if port else f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(
                f"cannot bind to {host}:{port} ({error.strerror}); choose another {port_flag}"
            ) from error
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.host = host
        self.port = int(bound.rpartition(":")[2])
        self._start()

    def _dispatch(self, parts: list[bytes]) -> None:
        self._on_frame(parts[0], parts[1] if len(parts) == 2 else b"")

    def send(self, routing_id: bytes, frame: bytes) -> bool:
        """Queue one frame; False when there is no such peer or its queue is full."""
        return self._send(frame, routing_id)


class DealerChannel(_Socket):
    """A DEALER dialled to one endpoint under a routing id; it redials by itself."""

    def __init__(
        self,
        endpoint: str,
        routing_id: bytes,
        on_frame: Callable[[bytes], None],
        frame_bytes_max: int,
    ) -> None:
        """Connect to `endpoint` (`tcp://HOST:PORT`); `on_frame(frame)` per frame.

        Frames are queued only while a connection is up: what is said to nobody is refused at
        once, and the next heartbeat says it again.

        Raises:
            ConfigError: `endpoint` is not an address.
        """
        super().__init__(zmq.DEALER, frame_bytes_max)
        self.endpoint = endpoint
        self._on_frame = on_frame
        self._socket.setsockopt(zmq.ROUTING_ID, routing_id)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"{endpoint!r} is not an address to connect to: {error}") from error
        self._start()

    def _dispatch(self, parts: list[bytes]) -> None:
        self._on_frame(parts[0] if len(parts) == 1 else b"")

    def send(self, frame: bytes) -> bool:
        """Queue one frame; False when no connection is up or the queue is full."""
        return self._send(frame)
