"""Handshakes of channels: who is let in, and what is told of those that fail.

With a cluster key, sockets use CURVE (CurveZMQ, RFC 26). Who dials pins the key's public half; who
binds asks an `Authenticator`, by libzmq's own question (ZAP, RFC 27), whether the peer has proved
the secret half of that same pair.
"""

from __future__ import annotations

import asyncio
import hmac
import struct
from collections.abc import Callable
from enum import Enum

import zmq
from zmq.utils import z85

from pdrt.transfer.cluster_key import ClusterKey

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
"""Where libzmq asks, in each context."""
ZAP_DOMAIN = b"pdrt"
"""Any name: without one libzmq does not ask."""
HANDSHAKE_MS = 5000
"""A peer that connects and says nothing is hung up on after this long."""
EVENTS_PER_TURN = 64
"""Read before other callbacks of the loop get their turn."""

SOCKETS_MAX = 8192
"""Of a process. A channel takes three: its own, and two that tell of its handshakes. libzmq's own
bound, 1023, is a third of what `prefill_endpoints_max` peers take."""

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENT = struct.Struct("=Hi")
"""libzmq's: what happened, and a value."""


class Failure(Enum):
    """Why a handshake failed; a metric label."""

    MECHANISM = "mechanism"
    """One side has a cluster key, the other has none."""
    KEY = "key"
    """Both have one, and they differ."""
    PROTOCOL = "protocol"
    """The peer does not speak ZMTP, or not rightly."""
    CLOSED = "closed"
    """The peer hung up in the middle: it ended, or it did not like what it read."""


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """Raises OSError: this process can open nothing more, for now."""
    try:
        return context.socket(kind)
    except zmq.ZMQError as error:
        raise OSError(error.errno, error.strerror) from error


def shared_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Of all sockets but those bound with a key."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)  # of no effect once there is a socket
    return context


def protect_bound(socket: zmq.Socket[bytes], key: ClusterKey) -> None:
    """Before it is bound; an `Authenticator` must live in its context."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    # Should nobody be there to ask, nobody is let in.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def protect_dialling(socket: zmq.Socket[bytes], key: ClusterKey) -> None:
    """Before it connects."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, key.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)


class Authenticator:
    """Says, for all bound sockets of one context, whose keys are let in: the cluster's own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], key: ClusterKey) -> None:
        self._public = z85.decode(key.public)
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)
        self._loop.add_reader(self._socket.FD, self._answer_some)
        self._loop.call_soon(self._answer_some)

    def _answer_some(self) -> None:
        for _ in range(EVENTS_PER_TURN):
            if self._socket.closed:
                return
            try:
                question = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._socket.send_multipart(self._answer(question))
        self._loop.call_soon(self._answer_some)

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """libzmq's own frames: version, request, domain, address, identity, mechanism and, for
        CURVE, the 32 bytes of the peer's public key."""
        version, request, mechanism, credentials = *question[:2], question[5], question[6:]
        is_member = mechanism == b"CURVE" and hmac.compare_digest(credentials[0], self._public)
        verdict = (b"200", b"OK") if is_member else (b"400", b"not a member of the cluster")
        return [version, request, *verdict, b"", b""]

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
            self._socket.close()


class HandshakeWatch:
    """Tells of the handshakes of one socket that fail, and of connections that end."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_failed: Callable[[Failure], None],
        on_disconnected: Callable[[], None],
    ) -> None:
        """`on_disconnected` may be told of a failed handshake too.

        Raises OSError: this process can open nothing more, for now.
        """
        self._watched = socket
        self._on_failed = on_failed
        self._on_disconnected = on_disconnected
        self._loop = asyncio.get_running_loop()
        endpoint = f"inproc://handshakes-{socket.FD}"
        try:
            socket.monitor(endpoint, _FAILED | zmq.EVENT_DISCONNECTED)
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from error
        self._events = open_socket(socket.context, zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        # No bound: at one, libzmq's thread would wait for us, holding a lock that `close` needs.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.connect(endpoint)
        self._loop.add_reader(self._events.FD, self._read_some)
        # libzmq signals nothing to whoever has not looked yet.
        self._loop.call_soon(self._read_some)

    def _read_some(self) -> None:
        for _ in range(EVENTS_PER_TURN):
            if self._events.closed:
                return
            try:
                parts = self._events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, value = _EVENT.unpack(parts[0])
            if event == zmq.EVENT_DISCONNECTED:
                self._on_disconnected()
            else:
                self._on_failed(_failure(event, value))
        self._loop.call_soon(self._read_some)

    def close(self) -> None:
        """Before the watched socket is closed. Idempotent."""
        if not self._events.closed:
            self._loop.remove_reader(self._events.FD)
            self._watched.disable_monitor()
            self._events.close()


def _failure(event: int, value: int) -> Failure:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Failure.KEY
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return Failure.CLOSED
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return Failure.MECHANISM
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return Failure.KEY
    return Failure.PROTOCOL


_SAME_KEY = "start both with the same --cluster-key"
_RIGHT_PORT = "it does not speak this protocol: is it a pdrt, and is the port right?"
WORDS: dict[tuple[Failure, bool], str] = {
    (Failure.MECHANISM, True): f"it uses no cluster key, and this process does: {_SAME_KEY}",
    (Failure.MECHANISM, False): f"it uses a cluster key, and this process has none: {_SAME_KEY}",
    (Failure.KEY, True): f"its cluster key is another one: {_SAME_KEY}",
    (Failure.PROTOCOL, True): _RIGHT_PORT,
    (Failure.PROTOCOL, False): _RIGHT_PORT,
}
"""What is said of a peer, by whether this process has a key. Nothing, where it merely ended."""
HANG_UPS_MAX = 3
"""A peer that ends may hang up once or twice; who does it again and again has a reason."""
HUNG_UP = f"it breaks off handshakes: one of the two has no cluster key, or another: {_SAME_KEY}"
"""Of one that was dialled: what it did not like it keeps to itself."""
