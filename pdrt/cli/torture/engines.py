"""The engines that can be tried, made as workers make them. Their imports are heavy: only the
parties do them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdrt.config import MooncakeConfig, TransferConfig, WorkerConfig

if TYPE_CHECKING:
    from pdrt.kv.pool import KvPool
    from pdrt.transfer.engine import Receiver, Sender
    from pdrt.transfer.writable import WritableRooms

ENGINES = ("local", "tcp", "mooncake")


class End(msgspec.Struct, frozen=True):
    """Which engine, on which address of this host."""

    engine: str
    host: str
    mooncake: MooncakeConfig = MooncakeConfig()

    def config(self) -> WorkerConfig:
        """Of a worker with this engine alone."""
        transfer = msgspec.convert({"transfer": self.engine}, TransferConfig)
        return WorkerConfig(host=self.host, engines=transfer, mooncake=self.mooncake)


def make_receiver(end: End, pool: KvPool, rank: int, rooms: WritableRooms) -> Receiver:
    """`rooms`: those that may write here. Raises ConfigError where it cannot run."""
    from pdrt.transfer.engines import make_receivers

    return make_receivers(end.config(), pool, rooms, rank)[end.engine]


def make_sender(end: End, pool: KvPool) -> Sender:
    """Raises ConfigError where it cannot run."""
    from pdrt.transfer.engines import make_senders

    return make_senders(end.config(), pool)[end.engine]
