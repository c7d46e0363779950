"""The prefill side of the mooncake engine: one instance per decode worker and generation, one
thread that drives them all.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from pdrt.config import MooncakeConfig
from pdrt.errors import EngineError
from pdrt.ids import Incarnation
from pdrt.kv.pool import KvPool
from pdrt.protocol.messages import Segment
from pdrt.transfer.engine import OnSettled, WriteRequest
from pdrt.transfer.mooncake.descriptor import NAME, MooncakeDescriptor
from pdrt.transfer.mooncake.instance import Instance
from pdrt.transfer.mooncake.library import TCP, check_pool, load, rdma_devices, resolved
from pdrt.transfer.mooncake.poller import (
    Accept,
    Finish,
    Flight,
    Poller,
    Target,
)
from pdrt.transfer.mooncake.writes import Answer
from pdrt.transfer.sending import check_inside, instance_for, route_for, shown_by
from pdrt.transfer.slow_calls import on_own_thread, tell

CONNECT_SECONDS_MAX = 3.0
"""To each port; what does not answer by then is blocked."""


class MooncakeSender:
    """Accepts writes on the loop; the poller submits them and says how they ended."""

    name = NAME

    def __init__(
        self, pool: KvPool, host: str, config: MooncakeConfig, write_seconds_max: float
    ) -> None:
        """`host`: the address of this machine that peers dial.

        Raises:
            ConfigError: the library is not there, or not usable; says what to do.
        """
        check_pool(pool.tensor.device.type)
        self._config = resolved(config, rdma_devices())
        self._factory = load(self._config)
        self._pool = pool
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._flights: dict[tuple[Incarnation, int], Flight] = {}
        # Accepted and not answered.
        self._unanswered: dict[int, OnSettled] = {}
        self._numbers = itertools.count()
        self._poller = Poller(
            pool.address, write_seconds_max, self._on_answers, self._on_thread_ended
        )

    async def open(self, decode: Incarnation, generation: int, segments: Sequence[Segment]) -> None:
        """Make an engine and reach every segment with it: both ports answer, and a byte of it can
        be read.

        Raises:
            EngineError: one cannot be reached; says why and what to do.
        """
        assert (decode, generation) not in self._flights, (decode, generation)
        descriptors = {segment.rank: self._descriptor(segment) for segment in segments}
        for descriptor in descriptors.values():
            for port in filter(None, (descriptor.port, descriptor.data_port)):
                await _connect(descriptor.host, port)
        instance = Instance(self._factory, self._host, self._config)
        targets = {rank: _target(each) for rank, each in descriptors.items()}
        try:
            await self._reach(instance, targets)
        except EngineError:
            instance.close()
            raise
        self._flights[decode, generation] = Flight(instance, targets)

    async def _reach(self, instance: Instance, targets: Mapping[int, Target]) -> None:
        # Over TCP nobody needs to reach our memory, nor the library to know it.
        if self._config.mooncake_protocol != TCP:
            size = self._pool.size_bytes
            await on_own_thread(instance.register, self._pool.address, size)
        for target in targets.values():
            why = await on_own_thread(instance.reach, target.peer, target.address)
            if why is not None:
                raise EngineError(why)

    def _descriptor(self, segment: Segment) -> MooncakeDescriptor:
        descriptor: MooncakeDescriptor = shown_by(segment, NAME, MooncakeDescriptor)
        ours = self._config.mooncake_protocol
        if descriptor.protocol != ours:
            raise EngineError(
                f"decode has --mooncake-protocol {descriptor.protocol}, prefill {ours}: give both "
                "the same"
            )
        return descriptor

    def write(self, request: WriteRequest, on_settled: OnSettled) -> None:
        """Hand it to the poller's thread.

        Raises:
            EngineError: not accepted.
        """
        flight = instance_for(self._flights, request)
        target = route_for(flight.targets, request)
        check_inside(request.ranges, self._pool.size_bytes, target.size_bytes)
        number = next(self._numbers)
        self._unanswered[number] = on_settled
        self._poller.post(Accept(flight, number, request.decode_rank, request.ranges))

    async def close_instance(self, decode: Incarnation, generation: int) -> None:
        """Destroy it: what it has out gets a second, and then it reads nothing any more."""
        flight = self._flights.pop((decode, generation), None)
        if flight is None:
            return
        closed = self._loop.create_future()
        self._poller.post(Finish(flight, lambda: tell(self._loop, closed.set_result, None)))
        await closed

    def close(self) -> None:
        """At exit: what is out is left to the end of the process, as are the engines. Destroying
        one holds everything up, and some of them may have been asked to wait."""
        self._poller.quit()

    # In the poller's thread

    def _on_answers(self, flight: Flight, answers: list[Answer]) -> None:
        tell(self._loop, self._give, flight, answers, flight.writes.stopped is not None)

    def _on_thread_ended(self, ended: Future[None]) -> None:
        if (error := ended.exception()) is not None:
            tell(self._loop, _raise, error)

    # On the loop

    def _give(self, flight: Flight, answers: list[Answer], is_stopped: bool) -> None:
        if is_stopped:
            flight.takes_writes = False
        for answer in answers:
            self._unanswered.pop(answer.write)(answer.outcome, answer.detail)


def _raise(error: BaseException) -> None:
    """Nobody can go on without the thread: the loop ends the worker."""
    raise error


def _target(descriptor: MooncakeDescriptor) -> Target:
    peer = f"{descriptor.host}:{descriptor.port}"
    return Target(peer, descriptor.address, descriptor.size_bytes)


async def _connect(host: str, port: int) -> None:
    """See that somebody listens there. The library would wait much longer, and not say for whom."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS_MAX):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError as error:
        raise EngineError(
            f"{host}:{port} of the decode worker's mooncake engine does not answer within "
            f"{CONNECT_SECONDS_MAX:.0f} s: a firewall may drop what goes there; mooncake needs all "
            "ports open between the workers' hosts"
        ) from error
    except OSError as error:
        raise EngineError(
            f"{host}:{port} of the decode worker's mooncake engine cannot be reached: {error}"
        ) from error
    writer.transport.abort()
