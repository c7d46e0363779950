"""ZeroMQ sockets on an asyncio loop: frames come in by callback, sends never block.

libzmq signals a socket's descriptor on changes only, so whoever touches the socket must look at
it again afterwards; `drain` reads all there is, for callers about to judge a peer's silence.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import Callable

import zmq

from pdrt.errors import ConfigError
from pdrt.transfer.cluster_key import ClusterKey
from pdrt.transfer.handshake import (
    HANDSHAKE_MS,
    HANG_UPS_MAX,
    HUNG_UP,
    WORDS,
    Authenticator,
    Failure,
    HandshakeWatch,
    open_socket,
    protect_bound,
    protect_dialling,
    shared_context,
)

log = logging.getLogger(__name__)

FRAMES_PER_TURN = 256
"""Frames dispatched before other callbacks of the loop get their turn."""
QUEUE_FRAMES_MAX = 8192
"""Per peer and direction: twice the rooms of a worker; beyond it a send is refused."""
CLOSE_MS = 1000
"""What was said last still leaves after `close`, in libzmq's own thread, for this long."""
HEARTBEAT_MS = 2000
HEARTBEAT_TIMEOUT_MS = 5000
"""libzmq's own heartbeat: a connection that is half open is dropped and dialled again. Each pair of
workers pays for it, 80 µs at a time on both ends together, beside our own."""
REDIAL_SECONDS = 1.0
"""After a handshake that libzmq does not try again by itself."""
SAY_AGAIN_SECONDS = 60.0
"""Handshakes of strangers that fail are told of at most this often, by kind."""

Context = zmq.Context[zmq.Socket[bytes]]


def _make_socket(context: Context, kind: int, frame_bytes_max: int) -> zmq.Socket[bytes]:
    """With the bounds that all have. Raises OSError: nothing more can be opened, for now."""
    socket = open_socket(context, kind)
    for option, value in (
        (zmq.LINGER, CLOSE_MS),
        (zmq.SNDHWM, QUEUE_FRAMES_MAX),
        (zmq.RCVHWM, QUEUE_FRAMES_MAX),
        # Larger ones cost the sender its connection before they cost us memory.
        (zmq.MAXMSGSIZE, 2 * frame_bytes_max),
        (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
        (zmq.RECONNECT_IVL, 100),
        (zmq.RECONNECT_IVL_MAX, 1000),
    ):
        socket.setsockopt(option, value)
    return socket


class _Channel:
    """What both kinds share: reading, sending, closing."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_read_due = False
        self.on_refused: Callable[[Failure], None] = lambda failure: None
        """A handshake has failed; for whoever counts them."""
        self.on_disconnected: Callable[[], None] = lambda: None
        """A connection has ended, whosever it was."""

    def _start(self, socket: zmq.Socket[bytes]) -> None:
        """From now on this is the channel's socket. Raises OSError, as `_make_socket`."""
        try:
            self._watch = HandshakeWatch(socket, self._handshake_failed, self._disconnected)
        except OSError:
            socket.close()
            raise
        self._socket = socket
        self._loop.add_reader(socket.FD, self._read_some)
        self._read_soon()

    def _stop(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
            self._watch.close()
            self._socket.close()

    def _read_soon(self) -> None:
        """In the next turn of the loop, once however often this is called until then."""
        if not self._is_read_due:
            self._is_read_due = True
            self._loop.call_soon(self._read_some)

    def _dispatch(self, parts: list[bytes]) -> None:
        raise NotImplementedError

    def _handshake_failed(self, failure: Failure) -> None:
        raise NotImplementedError

    def _disconnected(self) -> None:
        self.on_disconnected()

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
            self._stop()


class RouterChannel(_Channel):
    """A bound ROUTER. Replies go to a routing id, never to "whoever spoke last"."""

    def __init__(
        self,
        host: str,
        port: int,
        on_frame: Callable[[bytes, bytes], None],
        frame_bytes_max: int,
        key: ClusterKey | None = None,
    ) -> None:
        """Bind to `host`:`port` (0 picks a port); `on_frame(routing_id, frame)` per frame. With a
        `key`, only peers that prove the same one are let in.

        A multipart message of another shape arrives as one empty frame, which no decoder takes.

        Raises:
            ConfigError: the address cannot be bound; names it.
        """
        super().__init__()
        self._on_frame = on_frame
        self._has_key = key is not None
        self._silent_until: dict[Failure, float] = {}
        self._authenticator: Authenticator | None = None
        # Who is asked for keys is a matter of the context: one with a key has its own.
        self._context: Context = shared_context() if key is None else zmq.Context()
        socket = _make_socket(self._context, zmq.ROUTER, frame_bytes_max)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if key is not None:
            self._authenticator = Authenticator(self._context, key)
            protect_bound(socket, key)
        self._start(socket)
        try:
            socket.bind(f"tcp://{host}:{port}" if port else f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot bind to {host}:{port} ({error.strerror})") from error
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.host = host
        self.port = int(bound.rpartition(":")[2])

    def _dispatch(self, parts: list[bytes]) -> None:
        self._on_frame(parts[0], parts[1] if len(parts) == 2 else b"")

    def _handshake_failed(self, failure: Failure) -> None:
        """Of whom, libzmq does not say; the peer itself says whom it dials in vain."""
        self.on_refused(failure)
        now = self._loop.time()
        why = WORDS.get((failure, self._has_key))
        if why is not None and now >= self._silent_until.get(failure, now):
            self._silent_until[failure] = now + SAY_AGAIN_SECONDS
            where = f"{self.host}:{self.port}"
            log.error("a peer is refused", extra={"at": where, "why": why})

    def send(self, routing_id: bytes, frame: bytes) -> bool:
        """Queue one frame; False when there is no such peer or its queue is full."""
        return self._send(frame, routing_id)

    def _stop(self) -> None:
        super()._stop()
        if self._authenticator is not None:
            self._authenticator.close()
            # It waits for what is still being sent.
            threading.Thread(target=self._context.term, name="zmq-term", daemon=True).start()


class DealerChannel(_Channel):
    """A DEALER dialled to one endpoint under a routing id; it redials by itself."""

    def __init__(
        self,
        endpoint: str,
        routing_id: bytes,
        on_frame: Callable[[bytes], None],
        frame_bytes_max: int,
        key: ClusterKey | None = None,
    ) -> None:
        """Connect to `endpoint` (`tcp://HOST:PORT`); `on_frame(frame)` per frame. With a `key`,
        only to a peer that proves the same one.

        Frames are queued only while a connection is up: what is said to nobody is refused at
        once, and the next heartbeat says it again.

        Raises:
            ConfigError: `endpoint` is not an address.
            OSError: this process can open nothing more, for now.
        """
        super().__init__()
        self.endpoint = endpoint
        self._routing_id = routing_id
        self._on_frame = on_frame
        self._frame_bytes_max = frame_bytes_max
        self._key = key
        self._redial: asyncio.TimerHandle | None = None
        self._begin_anew()
        self._dial()

    def _dial(self) -> None:
        socket = _make_socket(shared_context(), zmq.DEALER, self._frame_bytes_max)
        socket.setsockopt(zmq.ROUTING_ID, self._routing_id)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        if self._key is not None:
            protect_dialling(socket, self._key)
        self._start(socket)
        try:
            socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            self.close()
            message = f"{self.endpoint!r} is not an address to connect to: {error}"
            raise ConfigError(message) from error

    def _begin_anew(self) -> None:
        """The peer has let us in."""
        self.refusal: str | None = None
        """Why handshakes fail, in words; None once something has been heard of the peer."""
        self._hang_ups = 0
        # Each reason once, as the peer may give them in turn.
        self._said: set[str] = set()

    def _dispatch(self, parts: list[bytes]) -> None:
        if self.refusal is not None or self._hang_ups:
            self._begin_anew()
        self._on_frame(parts[0] if len(parts) == 1 else b"")

    def _handshake_failed(self, failure: Failure) -> None:
        self.on_refused(failure)
        is_hung_up = failure is Failure.CLOSED
        self._hang_ups += is_hung_up
        why = WORDS.get((failure, self._key is not None))
        if is_hung_up and self._hang_ups >= HANG_UPS_MAX:
            why = self.refusal or HUNG_UP
        if why is not None and why not in self._said:
            self.refusal = why
            self._said.add(why)
            log.error("a peer cannot be reached", extra={"peer": self.endpoint, "why": why})
        # A connection that was cut is dialled again by libzmq, one that spoke otherwise is not.
        if not is_hung_up and self._redial is None:
            self._redial_later()

    def _redial_later(self) -> None:
        self._redial = self._loop.call_later(REDIAL_SECONDS, self._dial_again)

    def _dial_again(self) -> None:
        self._redial = None
        self._stop()
        try:
            self._dial()
        except OSError:
            self._redial_later()

    def send(self, frame: bytes) -> bool:
        """Queue one frame; False when no connection is up or the queue is full."""
        return self._send(frame)

    def close(self) -> None:
        """As of every channel. Idempotent."""
        if self._redial is not None:
            self._redial.cancel()
            self._redial = None
        super().close()
