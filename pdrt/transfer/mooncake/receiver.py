"""The decode side of the mooncake engine: one instance per prefill worker and generation.

A peer can write wherever its instance has memory registered. So each pairing and each generation
has an instance of its own, which is taken out of service to fence that writer and disturbs nobody
else. One that has been is never registered again.
"""

from __future__ import annotations

import logging

import msgspec

from pdrt.config import MooncakeConfig
from pdrt.errors import ConfigError, EngineError
from pdrt.kv.pool import KvPool
from pdrt.protocol.messages import Segment
from pdrt.protocol.writers import FenceKind
from pdrt.transfer.mooncake.descriptor import NAME, MooncakeDescriptor
from pdrt.transfer.mooncake.instance import Fence, Instance
from pdrt.transfer.mooncake.library import check_pool, load, rdma_devices, resolved
from pdrt.transfer.slow_calls import on_own_thread

log = logging.getLogger(__name__)

TOMBSTONES_MAX = 32
"""Retired instances: two threads, five descriptors and two ports each. With so many the worker is
to drain and restart; it goes on fencing meanwhile, up to twice as many."""
ADDR_NO_RANDOMIZE = 0x0040000


class MooncakeReceiver:
    """Opens and retires instances that expose one rank's pool."""

    name = NAME
    fence = FenceKind.RETIRE_GENERATION

    def __init__(self, pool: KvPool, host: str, config: MooncakeConfig) -> None:
        """`host`: the address of this machine that peers dial.

        Raises:
            ConfigError: the library is not there, or not usable; says what to do.
        """
        if not _has_random_addresses():
            raise ConfigError(
                "addresses are not randomized here (setarch -R, or kernel.randomize_va_space=0): "
                "what a peer repeats of a worker that has died could be written into its "
                "successor; start it without that, or use another --transfer"
            )
        check_pool(pool.tensor.device.type)
        self._config = resolved(config, rdma_devices())
        self._factory = load(self._config)
        self._pool = pool
        self._host = host
        # By endpoint and generation: those that peers may write through.
        self._open: dict[tuple[str, int], Instance] = {}
        # Nothing can be written through them. Kept for their ports.
        self._tombstones: list[Instance] = []

    @property
    def restart_reason(self) -> str | None:
        """Why the worker is to drain and exit, so that its successor starts without tombstones."""
        if len(self._tombstones) < TOMBSTONES_MAX:
            return None
        return f"{len(self._tombstones)} mooncake engines have been fenced: it drains and exits"

    async def open_segment(self, rank: int, endpoint: str, generation: int) -> Segment:
        """A new instance, with the pool registered.

        Raises:
            EngineError: it cannot be made.
        """
        assert (endpoint, generation) not in self._open, (endpoint, generation)
        if len(self._tombstones) >= 2 * TOMBSTONES_MAX:
            raise EngineError(f"{len(self._tombstones)} mooncake engines have been fenced")
        instance = Instance(self._factory, self._host, self._config)
        await on_own_thread(instance.register, self._pool.address, self._pool.size_bytes)
        self._open[endpoint, generation] = instance
        descriptor = MooncakeDescriptor(
            host=self._host,
            port=instance.port,
            data_port=instance.data_port,
            protocol=self._config.mooncake_protocol,
            address=self._pool.address,
            size_bytes=self._pool.size_bytes,
        )
        return Segment(rank=rank, engine=NAME, descriptor=msgspec.msgpack.encode(descriptor))

    async def close_segment(self, endpoint: str, generation: int) -> None:
        """Retire it; returns once nothing more can be written through it."""
        instance = self._open.pop((endpoint, generation))
        fence = await on_own_thread(instance.retire)
        self._tombstones.append(instance)
        if fence is Fence.DESTROYED:
            log.info("a mooncake engine has been destroyed", extra={"endpoint": endpoint})

    async def close_offer(self, endpoint: str, generation: int) -> None:
        """Destroy it, ports and all: nobody has anything queued for it that could be repeated to
        whoever has them next."""
        instance = self._open.pop((endpoint, generation))
        await on_own_thread(instance.close)

    def close(self) -> None:
        """Let go of everything, at exit."""
        for instance in (*self._open.values(), *self._tombstones):
            instance.close()
        self._open.clear()
        self._tombstones.clear()


def _has_random_addresses() -> bool:
    """The kernel places mappings at random, for every process and for this one."""
    with open("/proc/sys/kernel/randomize_va_space", encoding="ascii") as file:
        is_on = file.read().strip() != "0"
    with open("/proc/self/personality", encoding="ascii") as file:
        is_off_here = int(file.read(), 16) & ADDR_NO_RANDOMIZE
    return is_on and not is_off_here
