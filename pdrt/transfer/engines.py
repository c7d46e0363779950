"""Which transfer engines a worker has: by `--transfer`, by what is installed, by the machine.

What a pair uses of them is chosen in `protocol.engine_choice`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import TypeVar

from pdrt.config import WorkerConfig
from pdrt.errors import ConfigError
from pdrt.kv.pool import KvPool
from pdrt.protocol.engine_choice import in_order
from pdrt.transfer.engine import Receiver, Sender
from pdrt.transfer.local import LocalReceiver, LocalSender
from pdrt.transfer.mooncake.library import installed_wheels, rdma_devices
from pdrt.transfer.mooncake.receiver import MooncakeReceiver
from pdrt.transfer.mooncake.sender import MooncakeSender
from pdrt.transfer.tcp.receiver import Place, TcpReceiver
from pdrt.transfer.tcp.sender import TcpSender
from pdrt.transfer.tcp.sockets import source_address
from pdrt.transfer.writable import WritableRooms

log = logging.getLogger(__name__)

AUTO = "auto"
ANY_HOST = "0.0.0.0"
TCP_CONNECTIONS = 4
TCP_CONNECTIONS_FEW_CORES = 2
FEW_CORES = 2

Engine = TypeVar("Engine", Receiver, Sender)


def make_receivers(
    config: WorkerConfig, pool: KvPool, rooms: WritableRooms, rank: int
) -> dict[str, Receiver]:
    """The engines that a decode rank offers, best first. On its loop.

    Raises:
        ConfigError: none can be had, or not the one that was asked for; says what to do.
    """
    shown_host = host_to_dial(config)
    port = config.data_port + rank if config.data_port else 0
    place = Place(rank, config.host, shown_host, port)
    makers: dict[str, Callable[[], Receiver]] = {
        "local": lambda: LocalReceiver(pool),
        "tcp": lambda: TcpReceiver(pool, rooms, place),
        "mooncake": lambda: MooncakeReceiver(pool, shown_host, config.mooncake),
    }
    return _make(config.engines.transfer, makers)


def make_senders(config: WorkerConfig, pool: KvPool) -> dict[str, Sender]:
    """The engines that a prefill rank has, best first. On its loop.

    Raises:
        ConfigError: none can be had, or not the one that was asked for; says what to do.
    """
    seconds_max, host = config.protocol.write_seconds_max, host_to_dial(config)
    makers: dict[str, Callable[[], Sender]] = {
        "local": lambda: LocalSender(pool, seconds_max),
        "tcp": lambda: TcpSender(pool, tcp_connections(config), seconds_max),
        "mooncake": lambda: MooncakeSender(pool, host, config.mooncake, seconds_max),
    }
    return _make(config.engines.transfer, makers)


def _make(transfer: str, makers: Mapping[str, Callable[[], Engine]]) -> dict[str, Engine]:
    """With `auto`, one that cannot be had is left out, and the log says why."""
    if transfer != AUTO:
        return {transfer: makers[transfer]()}
    made: dict[str, Engine] = {}
    for name in automatic():
        try:
            made[name] = makers[name]()
        except ConfigError as error:
            log.warning("a transfer engine is left out", extra={"engine": name, "why": error})
    if not made:
        raise ConfigError("no transfer engine can be had here; the log says why of each")
    return made


def automatic() -> tuple[str, ...]:
    """What is tried where nothing is asked for by name, best first. Mooncake is worth its instances
    where it can use RDMA."""
    has_rdma = bool(installed_wheels()) and bool(rdma_devices())
    return in_order({"local", "tcp", *(["mooncake"] if has_rdma else [])})


def tcp_connections(config: WorkerConfig) -> int:
    """Of the tcp engine, between two ranks. On few cores more of them only take turns."""
    if config.engines.tcp_connections is not None:
        return config.engines.tcp_connections
    cores = len(os.sched_getaffinity(0))
    return TCP_CONNECTIONS_FEW_CORES if cores <= FEW_CORES else TCP_CONNECTIONS


def host_to_dial(config: WorkerConfig) -> str:
    """The address under which peers reach a worker: what it binds to or, where that is every
    address, the one that it reaches its gateway from.

    Raises:
        ConfigError: there is no way to its gateway.
    """
    if config.host != ANY_HOST:
        return config.host
    host, port = config.gateway[0].rsplit(":", 1)
    try:
        return source_address(host)
    except OSError as error:
        raise ConfigError(
            f"no way to the gateway at {host}:{port}: {error}; give --host one address that the "
            "other workers can reach"
        ) from error
