"""One engine of the library, and how it is taken out of service for good.

What ends all writes into the memory of an instance:

- over TCP: its memory is unregistered, so that the header of a new request is refused; the
  connections to its data port are shut down, so that requests under way read no more than has
  arrived; and they are waited for until they are closed, which the library does after the last
  handler that copies into memory has returned. The instance stays as a tombstone: its ports must
  not come to mean another instance, as its peers dial them again to repeat what they had queued.
- over anything else, or where that cannot be shown in time: the instance is destroyed, with its
  threads, queue pairs and memory regions, and its ports stay taken by duplicates of its listeners.

Tried over TCP on Linux with the wheel that constraints.txt names. Destroying is the only fence over
RDMA, and there it has not been tried.
"""

from __future__ import annotations

import ctypes
import logging
import socket
import struct
import time
from collections.abc import Sequence
from enum import Enum

from pdrt.config import MooncakeConfig
from pdrt.errors import EngineError
from pdrt.transfer.mooncake.library import (
    DONE_CODE,
    NOT_SUBMITTED,
    RUNNING_CODES,
    TCP,
    Engine,
    EngineFactory,
)
from pdrt.transfer.mooncake.sockets import (
    duplicate_listeners,
    listening_ports,
    open_sockets,
    shut_down_sessions,
)

log = logging.getLogger(__name__)

NO_METADATA_SERVER = "P2PHANDSHAKE"
SESSIONS_SECONDS_MAX = 1.0
"""They close within some milliseconds; after this the instance is destroyed instead."""
LOOK_SECONDS = 0.0002
REACH_SECONDS_MAX = 5.0
ACCEPT_TIMEOUT = struct.pack("ll", 0, 1000)
"""A millisecond, as a timeval."""
HASTEN_SECONDS_MAX = 0.1


class Fence(Enum):
    """What has ended all writes into an instance's memory."""

    SESSIONS_CLOSED = "sessions_closed"
    DESTROYED = "destroyed"


class Instance:
    """An engine with its own ports. Making and destroying it hold the GIL, for some milliseconds.
    Nobody but its owner may keep a reference to `engine`."""

    def __init__(self, factory: EngineFactory, host: str, config: MooncakeConfig) -> None:
        """Listens, on all interfaces, whatever `host` is: that is what peers dial. Call it on the
        loop: nothing else may begin to listen meanwhile, or the ports could not be told.

        Raises:
            EngineError: it cannot be made.
        """
        self._protocol = config.mooncake_protocol
        self.is_tcp = self._protocol == TCP
        before = _listening_ports()
        engine = factory()
        if engine.initialize(host, NO_METADATA_SERVER, self._protocol, config.mooncake_devices):
            raise EngineError(
                f"a mooncake engine for {self._protocol} on {host} cannot be made; its own words "
                "are on stderr"
            )
        self.engine: Engine | None = engine
        self.port = engine.get_rpc_port()
        """Where peers ask how this instance is reached."""
        self.data_port = self._find_data_port(_listening_ports() - before - {self.port})
        """Where they connect to; 0 when not over TCP."""
        self._registered: int | None = None
        # As long as the engine, which may write to it.
        self._scratch = ctypes.create_string_buffer(1)
        self._listeners: list[socket.socket] = []
        """Duplicates of its own, once it has been destroyed."""

    def _find_data_port(self, new_ports: set[int]) -> int:
        ports = sorted(new_ports)
        if not self.is_tcp:
            if ports:
                raise EngineError(
                    f"mooncake was asked for {self._protocol} and uses TCP (it listens on "
                    f"{ports}); use --mooncake-protocol tcp"
                )
            return 0
        if len(ports) != 1:
            raise EngineError(
                f"a mooncake engine listens on {ports} beside {self.port}, not on one data port: "
                "its fence is not known to work with this version of the library"
            )
        return ports[0]

    def register(self, address: int, size_bytes: int) -> None:
        """Let peers read and write this memory. Blocks while it is pinned, without the GIL.

        Raises:
            EngineError: it cannot be registered.
        """
        assert self.engine is not None and self._registered is None
        if self.engine.batch_register_memory([address], [size_bytes]):
            raise EngineError(f"mooncake cannot register {size_bytes} bytes of KV pool")
        self._registered = address

    def reach(self, peer: str, address: int) -> str | None:
        """Connect to a peer that has memory registered at `address`. Blocks, without the GIL.
        Returns why it failed, in words: an exception would keep a reference to the engine."""
        assert self.engine is not None
        if self.is_tcp:
            # Reading one byte takes the way of all later writes and changes nothing there.
            scratch = ctypes.addressof(self._scratch)
            transfer = self.engine.batch_transfer_async_read(peer, [scratch], [address], [1])
        else:
            transfer = self.engine.transfer_submit_write(peer, address, address, 0)
        if transfer in NOT_SUBMITTED:
            return f"mooncake does not reach {peer}"
        deadline = time.monotonic() + REACH_SECONDS_MAX
        while (code := self.engine.transfer_check_status(transfer)) in RUNNING_CODES:
            if time.monotonic() > deadline:
                return f"mooncake at {peer} does not answer within {REACH_SECONDS_MAX:.0f} s"
            time.sleep(LOOK_SECONDS)
        return None if code == DONE_CODE else f"mooncake at {peer} refuses to be reached"

    def retire(self) -> Fence:
        """End all writes into its memory, for good. Blocks; call it from a thread."""
        if self.is_tcp and self._closes_sessions():
            return Fence.SESSIONS_CLOSED
        self.destroy()
        return Fence.DESTROYED

    def _closes_sessions(self) -> bool:
        assert self.engine is not None and self._registered is not None
        if self.engine.batch_unregister_memory([self._registered]):
            log.error("mooncake does not unregister memory: its engine is destroyed")
            return False
        # From here on a request is refused that has not been accepted yet, so that these are all.
        try:
            sessions = shut_down_sessions(self.data_port)
            deadline = time.monotonic() + SESSIONS_SECONDS_MAX
            while sessions & open_sockets():
                if time.monotonic() > deadline:
                    log.error("mooncake does not close its connections: its engine is destroyed")
                    return False
                time.sleep(LOOK_SECONDS)
        except OSError as error:
            log.error("cannot look for mooncake's connections: its engine is destroyed: %s", error)
            return False
        return True

    def destroy(self) -> None:
        """Its threads are joined and everything is let go of, but for its ports: those stay taken,
        by listeners that never accept, as another instance would inherit its peers with them."""
        if self.engine is None:
            return
        try:
            self._listeners = duplicate_listeners({self.port, self.data_port})
            _hasten(self._listeners, self.port)
        except OSError as error:
            log.warning("the ports of a mooncake engine are not kept: %s", error)
        self.engine = None

    def close(self) -> None:
        """Destroy it and let go of its ports too."""
        self.destroy()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()


def _hasten(listeners: Sequence[socket.socket], port: int) -> None:
    """The destructor holds the GIL and waits for the thread that accepts on this port, which looks
    up once a second. From now on it looks up each millisecond. Raises OSError."""
    for listener in listeners:
        if listener.getsockname()[1] == port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, ACCEPT_TIMEOUT)
    # What it waits for already is not shortened by that.
    socket.create_connection(("127.0.0.1", port), HASTEN_SECONDS_MAX).close()


def _listening_ports() -> set[int]:
    try:
        return listening_ports()
    except OSError as error:
        raise EngineError(f"cannot tell which ports this process listens on: {error}") from error
