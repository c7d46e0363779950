"""Prefill and decode workers in this process, over real sockets and real copies, and a gateway
whose lines are written by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from pdrt.config import ModelConfig, ProtocolConfig, SchedulerConfig, WorkerConfig
from pdrt.decode.worker import DecodeWorker
from pdrt.ids import Incarnation, RequestId, new_incarnation, routing_id
from pdrt.kv.pages import OwnerKind, PageTable
from pdrt.prefill.worker import PrefillWorker
from pdrt.protocol.codec import Decoder, encode
from pdrt.protocol.gateway_messages import (
    Cancel,
    Credit,
    Finished,
    FinishReason,
    Inspect,
    PromptLogprobs,
    Register,
    Registered,
    Report,
    Role,
    StepTokens,
    Submit,
    Tokens,
    WorkerToGateway,
)
from pdrt.sampling import Sampling, TokenLogprobs
from pdrt.transfer.channel import RouterChannel
from pdrt.transfer.cluster_key import ClusterKey
from pdrt.transfer.rank_children import RankChild
from pdrt.transfer.worker_loop import ExitCode
from tests.prefill.executor import StandInExecutor, output_of

HANG_SECONDS = 120.0
"""Nothing here takes seconds; whoever waits longer than this hangs."""
NEVER = 1e8
FRAME_BYTES = 1 << 20
PROTOCOL = ProtocolConfig(
    hello_interval_seconds=0.05,
    silence_seconds=NEVER,
    tick_late_seconds=NEVER,
    revoke_resend_seconds=0.05,
    revoke_resend_seconds_max=0.2,
    # Both workers live in the test's own process: nothing may set off a fence.
    fence_after_seconds=NEVER,
    kill_lost_after_seconds=NEVER,
)
SCHEDULER = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16, local_prefill="off")
"""What is handed over here cannot be computed by the decode worker in secret."""


async def until(is_true: Callable[[], object], what: str) -> None:
    """Wait for something that must come."""
    try:
        async with asyncio.timeout(HANG_SECONDS):
            while not is_true():  # noqa: ASYNC110
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"never happened: {what}") from None


class Stream:
    """What a gateway has heard of one request."""

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.request = submit.request
        self.earlier = len(submit.output_token_ids)
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.scores: PromptLogprobs | None = None
        self.cached_tokens: int | None = None
        self.prefills: list[Incarnation] = []
        """Who computed the prompt, once per room."""
        self.finished: Finished | None = None
        self.finishes = 0

    async def end(self) -> Finished:
        await until(lambda: self.finished, f"the end of {self.request}")
        assert self.finished is not None
        return self.finished

    async def reach(self, count: int) -> None:
        await until(lambda: len(self.tokens) >= count or self.finished, f"{count} tokens")


class GatewayPeer:
    """Answers every `Register`, and says what the test tells it to."""

    def __init__(
        self,
        port: int = 0,
        incarnation: Incarnation | None = None,
        key: ClusterKey | None = None,
    ) -> None:
        self.incarnation = incarnation or new_incarnation()
        self.channel = RouterChannel("127.0.0.1", port, self._on_frame, FRAME_BYTES, key)
        self.address = f"127.0.0.1:{self.channel.port}"
        self.registers: dict[Incarnation, Register] = {}
        self.streams: dict[RequestId, Stream] = {}
        self.reports: list[Report] = []
        self.is_mute = False
        self.endpoints: tuple[str, ...] | None = None
        """What decode workers are told, in place of the prefill workers that registered."""
        self.preferred: tuple[str, ...] = ()
        """Prefill endpoints that requests name."""
        self._decoder: Decoder[WorkerToGateway] = Decoder(WorkerToGateway, FRAME_BYTES)
        self._serial = 0

    def _on_frame(self, peer: bytes, frame: bytes) -> None:
        message = self._decoder.decode(frame)
        match message:
            case Register():
                assert peer == routing_id(message.worker)
                self._register(message)
            case StepTokens():
                assert {tokens.worker for tokens in message.tokens} == {message.worker}
                for tokens in message.tokens:
                    self._take(tokens)
            case Tokens():
                self._take(message)
            case PromptLogprobs():
                stream = self.streams[message.request]
                assert (stream.scores, stream.tokens, stream.finished) == (None, [], None)
                stream.scores = message
            case Finished():
                stream = self.streams[message.request]
                stream.finished = stream.finished or message
                stream.finishes += 1
            case Report():
                self.reports.append(message)

    def _take(self, message: Tokens) -> None:
        stream = self.streams[message.request]
        assert message.first_index == stream.earlier + len(stream.tokens), message
        assert stream.finished is None, message
        stream.tokens += message.token_ids
        stream.logprobs += message.logprobs
        if message.cached_tokens is not None:
            stream.cached_tokens = message.cached_tokens
        if message.prefill is not None:
            stream.prefills.append(message.prefill)

    def _register(self, message: Register) -> None:
        self.registers[message.worker] = message
        if self.is_mute:
            return
        listed = [r.endpoint for r in self.registers.values() if r.role is Role.PREFILL]
        endpoints = tuple(e for e in listed if e is not None)
        answer = Registered(
            gateway=self.incarnation,
            worker=message.worker,
            seq=message.seq,
            prefill_endpoints=endpoints if self.endpoints is None else self.endpoints,
        )
        self.send(message.worker, encode(answer))

    def send(self, worker: Incarnation, frame: bytes) -> bool:
        return self.channel.send(routing_id(worker), frame)

    def submit(
        self,
        worker: Incarnation,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        earlier: Sequence[int] = (),
        **changes: object,
    ) -> Stream:
        """`changes`: to the fields of `Submit`."""
        self._serial += 1
        submit = Submit(
            request=RequestId(self.incarnation, self._serial, 1),
            worker=worker,
            token_ids=tuple(prompt),
            output_token_ids=tuple(earlier),
            sampling=sampling,
            seconds_max=600.0,
            prefill_endpoints=self.preferred,
        )
        submit = msgspec.structs.replace(submit, **changes)
        stream = self.streams[submit.request] = Stream(submit)
        assert self.send(worker, encode(submit))
        return stream

    def cancel(self, worker: Incarnation, stream: Stream, why: str = "client gone") -> None:
        assert self.send(worker, encode(Cancel(stream.request, worker, why)))

    def credit(self, worker: Incarnation, stream: Stream, tokens_taken: int) -> None:
        assert self.send(worker, encode(Credit(stream.request, worker, tokens_taken)))

    async def inspect(self, worker: Incarnation) -> Report:
        count = len(self.reports)
        assert self.send(worker, encode(Inspect(worker, count, self.incarnation, check=True)))
        await until(lambda: len(self.reports) > count, "a report")
        return self.reports[-1]


class Deployment:
    """Workers that are run and, at the end, checked."""

    def __init__(self, gateway: GatewayPeer) -> None:
        self.gateway = gateway
        self.prefills: list[PrefillWorker] = []
        self.decodes: list[DecodeWorker] = []
        self.kv_checksum = False
        self._runs: dict[object, asyncio.Task[ExitCode]] = {}

    def config(
        self,
        protocol: ProtocolConfig = PROTOCOL,
        scheduler: SchedulerConfig = SCHEDULER,
        shutdown_timeout: float = 30.0,
    ) -> WorkerConfig:
        config = self.config_for(self.gateway.address, protocol, scheduler, self.kv_checksum)
        return msgspec.structs.replace(config, shutdown_timeout=shutdown_timeout)

    @staticmethod
    def config_for(
        gateway: str,
        protocol: ProtocolConfig = PROTOCOL,
        scheduler: SchedulerConfig = SCHEDULER,
        kv_checksum: bool = False,
    ) -> WorkerConfig:
        model = ModelConfig(kv_checksum=kv_checksum)
        return WorkerConfig(gateway=(gateway,), model=model, protocol=protocol, scheduler=scheduler)

    def add_prefill(
        self, executor: StandInExecutor, config: WorkerConfig, children: Sequence[RankChild] = ()
    ) -> PrefillWorker:
        worker = PrefillWorker(config, executor, children)  # type: ignore[arg-type]
        executor.page_owner = worker.pages.owner
        self._leave_when_heard(worker)
        self.prefills.append(worker)
        self._runs[worker] = asyncio.create_task(worker.run())
        return worker

    def _leave_when_heard(self, worker: PrefillWorker) -> None:
        """libzmq drops what a peer has not read when the connection ends. A process's death would
        tell the peer as much as the last word that was lost; here it is the test's own."""
        end, endpoint = worker.loop.end, worker.handover.endpoint

        def end_when_heard(code: ExitCode, why: str) -> None:
            leases = [lease for d in self.decodes for lease in d.table.leases.values()]
            if why != "left" or all(lease.endpoint != endpoint for lease in leases):
                end(code, why)  # else it comes back with the next tick

        worker.loop.end = end_when_heard  # type: ignore[method-assign]

    def add_decode(
        self, executor: StandInExecutor, config: WorkerConfig, children: Sequence[RankChild] = ()
    ) -> DecodeWorker:
        worker = DecodeWorker(config, executor, children)  # type: ignore[arg-type]
        executor.page_owner = worker.pages.owner
        self.decodes.append(worker)
        self._runs[worker] = asyncio.create_task(worker.run())
        return worker

    async def paired(self) -> None:
        """Every decode worker can use every prefill worker, and the gateway knows all."""
        await until(
            lambda: all(
                len(d.table.usable_endpoints()) >= len(self.prefills)
                and d.incarnation in self.gateway.registers
                and d.links.gateways()[0]["gateway"]
                for d in self.decodes
            ),
            "pairing",
        )

    def forgive(self, worker: object) -> None:
        """It was meant to break."""
        del self._runs[worker]
        self.prefills = [p for p in self.prefills if p is not worker]
        self.decodes = [d for d in self.decodes if d is not worker]

    async def exit_code(self, worker: object) -> ExitCode:
        async with asyncio.timeout(HANG_SECONDS):
            return await self._runs[worker]

    async def quiet(self) -> None:
        """No request, no lease, no room is left, and both pools are whole."""
        await until(
            lambda: all(
                not d.scheduler.requests and not d.table.leases
                for d in self.decodes
                if not self._runs[d].done()
            ),
            "decode workers without requests and leases",
        )
        await until(
            lambda: all(
                not p.table.rooms and not p.scheduler.jobs
                for p in self.prefills
                if not self._runs[p].done()
            ),
            "prefill workers without rooms",
        )
        for worker in self.running:
            worker.check()
            worker.pages.check()
            kept = worker.pages.count(OwnerKind.CACHE)
            assert worker.pages.count(OwnerKind.FREE) + kept == worker.pages.total
            assert not any(worker.pages.held_by(kind) for kind in OwnerKind), "a reader is left"

    @property
    def running(self) -> list[PrefillWorker | DecodeWorker]:
        return [w for w in (*self.prefills, *self.decodes) if not self._runs[w].done()]

    async def close(self) -> None:
        """End everything; whatever broke is shown here."""
        for worker, run in self._runs.items():
            if not run.done():
                worker.loop.end(ExitCode.STOPPED, "the test is over")  # type: ignore[attr-defined]
            code = await self.exit_code(worker)
            assert code is ExitCode.STOPPED, worker
        for any_worker in (*self.prefills, *self.decodes):
            any_worker.executor.close()
        self.gateway.channel.close()


@asynccontextmanager
async def deployed(
    *,
    prefill_pages: int = 64,
    decode_pages: int = 64,
    protocol: ProtocolConfig = PROTOCOL,
    scheduler: SchedulerConfig = SCHEDULER,
    kv_checksum: bool = False,
) -> AsyncIterator[Pair]:
    """One prefill and one decode worker, paired. At the end both must be whole and unbroken."""
    deployment = Deployment(GatewayPeer())
    deployment.kv_checksum = kv_checksum
    prefill_executor = StandInExecutor(prefill_pages)
    decode_executor = StandInExecutor(decode_pages)
    prefill = deployment.add_prefill(prefill_executor, deployment.config(protocol, scheduler))
    decode = deployment.add_decode(decode_executor, deployment.config(protocol, scheduler))
    pair = Pair(deployment, prefill, decode, prefill_executor, decode_executor)
    await deployment.paired()
    yield pair
    prefill_executor.gate.set()
    decode_executor.gate.set()
    await deployment.quiet()
    await deployment.close()


class Pair:
    """One of each, and shorthands."""

    def __init__(
        self,
        deployment: Deployment,
        prefill: PrefillWorker,
        decode: DecodeWorker,
        prefill_executor: StandInExecutor,
        decode_executor: StandInExecutor,
    ) -> None:
        self.deployment = deployment
        self.gateway = deployment.gateway
        self.prefill = prefill
        self.decode = decode
        self.prefill_executor = prefill_executor
        self.decode_executor = decode_executor

    def submit(self, prompt: Sequence[int], max_tokens: int = 8, **sampling: object) -> Stream:
        wanted = Sampling(max_tokens=max_tokens, temperature=0.0, **sampling)  # type: ignore[arg-type]
        return self.gateway.submit(self.decode.incarnation, prompt, wanted)

    async def submit_together(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, **sampling: object
    ) -> list[Stream]:
        """All are in the decode worker's pool before any of them grows there."""
        self.decode_executor.gate.clear()
        streams = [self.submit(prompt, max_tokens, **sampling) for prompt in prompts]
        await until(lambda: self.decode.scheduler.running == len(streams), "the landing of all")
        self.decode_executor.gate.set()
        return streams

    def cancel(self, stream: Stream) -> None:
        self.gateway.cancel(self.decode.incarnation, stream)

    async def serves(self, prompt: Sequence[int] = (5, 6, 7)) -> None:
        """A request passes from end to end."""
        stream = self.submit(prompt, 4)
        finished = await stream.end()
        assert finished.reason is FinishReason.LENGTH, finished
        assert stream.tokens == output_of(prompt, 4)


def in_use(pages: PageTable, kind: OwnerKind) -> int:
    """Pages that owners of `kind` own, and cached ones that they hold."""
    return pages.count(kind) + sum(map(len, pages.held_by(kind).values()))


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """A prompt unlike those of other salts."""
    return [1 + (salt * 131 + place * 7) % 997 for place in range(length)]
