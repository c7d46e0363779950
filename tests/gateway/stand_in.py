"""Workers as a gateway sees them: real sockets and messages, no model behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pdrt.ids import Incarnation, RequestId, new_incarnation, routing_id, short
from pdrt.protocol.codec import Decoder, encode
from pdrt.protocol.gateway_messages import (
    Cancel,
    Credit,
    Drain,
    Finished,
    FinishReason,
    GatewayToWorker,
    Inspect,
    PromptLogprobs,
    Register,
    Registered,
    Report,
    Role,
    Submit,
    Tokens,
    Usage,
)
from pdrt.sampling import TokenLogprobs
from pdrt.transfer.channel import DealerChannel
from tests.gateway.workers import fingerprint

HEARTBEAT_SECONDS = 0.1
FRAME_BYTES_MAX = 1 << 24


class StandIn:
    """One worker. What it does with a `Submit` is `on_submit`'s business; by default nothing."""

    def __init__(self, role: Role, gateway: str, digest: str, endpoint: str | None) -> None:
        self.worker: Incarnation = new_incarnation()
        self.name = short(self.worker)
        self.register = Register(
            role=role,
            worker=self.worker,
            seq=0,
            endpoint=endpoint,
            fingerprint=fingerprint(digest),
            max_model_len=1 << 20,
            requests_max=64,
            version="test",
        )
        self.on_submit: Callable[[Submit], None] = lambda submit: None
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []
        self.credits: list[Credit] = []
        self.drains: list[Drain] = []
        self.registered: list[Registered] = []
        self.report: Report | None = Report(self.worker, 0, b"", b'{"rooms": 0}')
        """What an `Inspect` is answered with."""
        self.answers_cancels = True
        self._decoder: Decoder[GatewayToWorker] = Decoder(GatewayToWorker, FRAME_BYTES_MAX)
        self._seq = 0
        self._gateway = gateway
        self.dial()

    def dial(self) -> None:
        """Also after `hang_up`."""
        self._channel = DealerChannel(
            f"tcp://{self._gateway}", routing_id(self.worker), self._on_frame, FRAME_BYTES_MAX
        )
        self._heartbeat = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            self.say()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def say(self, **changes: Any) -> None:
        """Register; `changes` to the registration stay."""
        self._seq += 1
        self.register = msgspec.structs.replace(self.register, seq=self._seq, **changes)
        self._channel.send(encode(self.register))

    def send(self, message: msgspec.Struct) -> None:
        self._channel.send(encode(message))

    def send_raw(self, frame: bytes) -> None:
        self._channel.send(frame)

    def tokens(
        self, request: RequestId, first: int, ids: Sequence[int], cached: int = 0, **more: Any
    ) -> None:
        self.send(Tokens(request, self.worker, first, tuple(ids), cached, **more))

    def prompt_logprobs(self, submit: Submit, cached: int = 0, **more: Any) -> None:
        """What a worker says of a prompt, if the request asks for it."""
        top = submit.sampling.prompt_logprobs
        if top is not None:
            scores = tuple(scored(token, top) for token in submit.token_ids[1:])
            self.send(PromptLogprobs(submit.request, self.worker, scores, cached, **more))

    def finish(
        self,
        request: RequestId,
        reason: FinishReason,
        usage: Usage | None = None,
        detail: str = "",
    ) -> None:
        self.send(Finished(request, self.worker, reason, usage, detail))

    def _on_frame(self, frame: bytes) -> None:
        match self._decoder.decode(frame):
            case Submit() as submit:
                self.submits.append(submit)
                self.on_submit(submit)
            case Cancel() as cancel:
                self.cancels.append(cancel)
                if self.answers_cancels:
                    self.finish(cancel.request, FinishReason.CANCELLED)
            case Credit() as credit:
                self.credits.append(credit)
            case Drain() as drain:
                self.drains.append(drain)
            case Registered() as registered:
                self.registered.append(registered)
            case Inspect(serial=serial):
                if self.report is not None:
                    self.send(msgspec.structs.replace(self.report, serial=serial))

    def hang_up(self) -> None:
        """Its connection ends; it lives."""
        self._heartbeat.cancel()
        self._channel.close()

    def die(self) -> None:
        """As after SIGKILL: nothing more is said."""
        self.hang_up()


def scored(token: int, top: int) -> TokenLogprobs:
    """What these workers say of a token, always the same: the most likely are the token itself and
    those after it; of an odd one, the token is not among them."""
    value = -0.25 - token % 8 / 8
    first = token + token % 2
    likely = tuple((first + i, value + token % 2 / 16 - i / 4) for i in range(top))
    return TokenLogprobs(value, 1 + token % 2 * (top + 1), likely)


def says(
    worker: StandIn, output: Sequence[int], end: FinishReason = FinishReason.STOP, cached: int = 0
) -> Callable[[Submit], None]:
    """An `on_submit` that goes on from where the output stands, to its end or `max_tokens`."""

    def answer(submit: Submit) -> None:
        first = len(submit.output_token_ids)
        last = min(len(output), submit.sampling.max_tokens)
        worker.prompt_logprobs(submit, cached)
        for index in range(first, last):
            worker.tokens(
                submit.request, index, [output[index]], cached, **asked(submit, [output[index]])
            )
        reason = end if last == len(output) else FinishReason.LENGTH
        usage = Usage(len(submit.token_ids), last, cached)
        worker.finish(submit.request, reason, usage)

    return answer


def begins(worker: StandIn, output: Sequence[int], count: int) -> Callable[[Submit], None]:
    """An `on_submit` that says `count` more tokens of the output, and then nothing."""

    def answer(submit: Submit) -> None:
        first = len(submit.output_token_ids)
        ids = output[first : first + count]
        worker.tokens(submit.request, first, ids, **asked(submit, ids))

    return answer


def asked(submit: Submit, ids: Sequence[int]) -> dict[str, Any]:
    """Fields of a `Tokens` that only some requests ask for."""
    top = submit.sampling.logprobs
    return {} if top is None else {"logprobs": tuple(scored(token, top) for token in ids)}
