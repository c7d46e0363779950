"""A gateway's core with its channel and its timer in this process, workers in several others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from pdrt.config import GatewayConfig, ProtocolConfig
from pdrt.gateway.effects import Submission
from pdrt.gateway.hub import Hub
from pdrt.gateway.stream import Outputs, OutputStream
from pdrt.ids import Incarnation, new_incarnation, short
from pdrt.protocol.clock import TICK_SECONDS
from pdrt.protocol.gateway_messages import FinishReason, Role
from pdrt.sampling import Sampling
from pdrt.transfer.channel import RouterChannel
from tests.scale import host
from tests.scale.executor import DIGEST
from tests.scale.host import Crew
from tests.transfer.forked import Forked

HANG_SECONDS = 300.0
"""Whoever waits longer than this hangs."""
REPORT_SECONDS_MAX = 60.0
"""For all workers to say how they are."""
LOOK_SECONDS = 0.05


async def until(look: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for something that must come."""
    try:
        async with asyncio.timeout(HANG_SECONDS):
            while not await look():  # noqa: ASYNC110 (others say it, not an event here)
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError:
        raise AssertionError(f"never happened: {what}") from None


class Host(Forked):
    """One process and its workers."""

    def __init__(self, crew: Crew) -> None:
        super().__init__(host.main, crew)
        self.role = crew.role
        self.workers: list[Incarnation] = self.first


class Cluster:
    """All that serves, and what is known of it."""

    def __init__(self, protocol: ProtocolConfig) -> None:
        self._protocol = protocol
        self._channel = RouterChannel(
            "127.0.0.1",
            0,
            # No frame is read before the loop turns, and then there is a hub.
            lambda peer, frame: self.hub.on_frame(peer, frame),  # noqa: PLW0108
            protocol.frame_bytes_max,
        )
        self.hub = Hub(
            GatewayConfig(protocol=protocol), (DIGEST,), new_incarnation(), self._channel.send
        )
        self.hub.read_all = self._channel.drain
        self.hosts: list[Host] = []
        self.leaving: list[Host] = []
        self.expected: set[Incarnation] = set()
        """Workers that are to be there."""

    async def tick(self) -> None:
        """The gateway's one timer."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._channel.drain()
            self.hub.on_tick()

    async def until(self, is_true: Callable[[], object], what: str) -> None:
        """Wait for something that must come, as long as all hosts live."""

        async def look() -> bool:
            self._check_hosts()
            return bool(is_true())

        await until(look, what)

    def _check_hosts(self) -> None:
        assert all(each.process.is_alive() for each in self.hosts), "a host has broken"

    # Members

    async def start(self, role: Role, workers: int) -> Host:
        crew = Crew(role, workers, f"127.0.0.1:{self._channel.port}", self._protocol)
        started = await asyncio.to_thread(Host, crew)
        self.hosts.append(started)
        self.expected.update(started.workers)
        return started

    async def settled(self) -> None:
        """Every worker that is to be there is known, no other lives, and all pairs are made."""

        def is_settled() -> bool:
            known = {worker.incarnation for worker in self.hub.registry.live()}
            return known == self.expected and not self.unpaired()

        try:
            await self.until(is_settled, "all pairs")
        except AssertionError as error:
            live = {worker.incarnation: worker.state for worker in self.hub.registry.live()}
            reports = await self.hub.inspect(True, REPORT_SECONDS_MAX)
            too_many = live.keys() - self.expected
            raise AssertionError(
                f"{error}; missing {_names(self.expected - live.keys())}, too many "
                f"{[(short(each), live[each], reports.get(each)) for each in too_many]}, "
                f"not paired {self.unpaired()}"
            ) from error

    def unpaired(self) -> dict[str, list[str | None]]:
        """Live decode workers, with the endpoints of live prefill workers with which their
        handshake is not over, or not known of."""
        said = [worker.register for worker in self.hub.registry.live()]
        prefills = {register.endpoint for register in said if register.role is Role.PREFILL}
        decodes = [register for register in said if register.role is Role.DECODE]
        lacking = {short(each.worker): prefills.difference(each.paired) for each in decodes}
        return {worker: sorted(rest) for worker, rest in lacking.items() if rest}

    def drain(self, asked: Host) -> None:
        """All of its workers finish what they have, and its process ends with them: a lease whose
        writer's last word was lost comes back with that end only."""
        self.hosts.remove(asked)
        self.leaving.append(asked)
        for worker in asked.workers:
            self.hub.drain(worker)
        self.expected.difference_update(asked.workers)

    async def left(self) -> None:
        """Whoever was asked to leave has done so, unbroken."""

        def are_gone() -> bool:
            return not any(each.process.is_alive() for each in self.leaving)

        await self.until(are_gone, "processes that end")
        assert [each.process.exitcode for each in self.leaving] == [0] * len(self.leaving)

    def kill(self, killed: Host) -> None:
        """SIGKILL; whoever started it tells the gateway, as `pdrt up` does."""
        self.hosts.remove(killed)
        killed.end()
        for worker in killed.workers:
            self.hub.doubt(worker)
        self.expected.difference_update(killed.workers)

    def tell(self, role: Role, order: str) -> None:
        for each in self.hosts:
            if each.role is role:
                each.connection.send(order)

    # What they say of themselves

    async def statuses(self, *, check: bool) -> list[dict[str, Any]]:
        """Of every worker; with `check`, all of their invariants hold."""
        reports = await self.hub.inspect(check, REPORT_SECONDS_MAX)
        self._check_hosts()
        assert reports.keys() == self.expected, "somebody does not answer"
        assert not [report.broken for report in reports.values() if report.broken]
        return [msgspec.json.decode(report.status) for report in reports.values()]

    async def rooms(self) -> int:
        """Alive on all prefill workers."""
        statuses = await self.statuses(check=False)
        return sum(status.get("rooms_total", 0) for status in statuses)

    async def quiet(self) -> None:
        """Nothing is left of any request, and all pools are whole."""
        await self.until(lambda: self.hub.is_quiet, "a gateway without attempts")
        assert self.hub.broken_invariants() == []

        async def is_quiet() -> bool:
            return not any(map(_in_flight, await self.statuses(check=True)))

        await until(is_quiet, "workers without requests, leases and rooms")
        for status in await self.statuses(check=True):
            pages = status["pages"]
            assert pages["free"] + pages["cache"] == status["pages_total"], pages

    # Clients

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], OutputStream]:
        """As a client that reads at once: its answer, which must come to its end."""
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        deadline = time.monotonic() + HANG_SECONDS
        submission = Submission(tuple(prompt), sampling, deadline, frozenset())
        assert self.hub.reserve(1)
        outputs, tokens = Outputs(), list[int]()
        stream = self.hub.open(submission, outputs)
        try:
            while True:
                await outputs.receive()
                received = stream.take()
                tokens += received.token_ids
                if received.ended is not None:
                    assert received.ended.reason is FinishReason.LENGTH, received.ended
                    return tokens, stream
                self.hub.take(stream, len(tokens))
        finally:
            self.hub.close(stream, "done")

    async def close(self) -> None:
        """Everybody leaves, unbroken."""
        for each in self.hosts:
            each.connection.close()
        for each in self.hosts:
            await asyncio.to_thread(each.process.join, HANG_SECONDS)
            assert each.process.exitcode == 0, each.role


def _names(workers: set[Incarnation]) -> list[str]:
    return sorted(map(short, workers))


def _in_flight(status: dict[str, Any]) -> int:
    """Of either role."""
    requests = sum(status.get("requests_by_state", {}).values())
    return requests + status.get("rooms_total", 0) + status.get("leases_total", 0)


@asynccontextmanager
async def cluster(protocol: ProtocolConfig) -> AsyncIterator[Cluster]:
    """At its end everything is checked, unless something failed before."""
    made = Cluster(protocol)
    ticking = asyncio.create_task(made.tick())
    try:
        yield made
        await made.close()
    finally:
        ticking.cancel()
        made._channel.close()
        for each in (*made.hosts, *made.leaving):
            each.process.kill()
