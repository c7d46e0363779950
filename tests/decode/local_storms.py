"""Aborts while a decode worker computes prompts itself."""

from __future__ import annotations

import random
from collections import Counter

from pdrt.ids import RequestId
from pdrt.protocol.gateway_messages import Cancel, FinishReason
from pdrt.sampling import Sampling
from tests.decode.deployment import Deployment, Stream, prompt_of, until
from tests.decode.storms import STORM, some_chunks
from tests.prefill.executor import output_of


class LocalStorm:
    """One decode worker alone, which computes prompts itself."""

    CLIENTS, LEAVING = 4, 3

    def __init__(self, deployment: Deployment, dice: random.Random) -> None:
        self.chunks: Counter[int] = Counter()
        """Cancels by how many chunks of the prompt were done when the worker took them."""
        self._deployment = deployment
        self._gateway = deployment.gateway
        (self._decode,) = deployment.decodes
        self._executor = self._decode.executor
        self._dice = dice
        self._salt = 0
        self._taken = 0
        links = self._decode.links
        pass_on = links.on_request

        def on_request(request: object) -> None:
            if isinstance(request, Cancel):
                self._count(request.request)
            pass_on(request)  # type: ignore[arg-type]

        links.on_request = on_request

    def _count(self, name: RequestId) -> None:
        self._taken += 1
        request = self._decode.scheduler.requests[name]
        if request.prefills_here:
            self.chunks[request.computed // STORM.max_num_batched_tokens] += 1

    def _submit(self) -> Stream:
        self._salt += 1
        prompt = prompt_of(self._dice.randint(40, 60), self._salt)
        sampling = Sampling(max_tokens=2, temperature=0.0)
        return self._gateway.submit(self._decode.incarnation, prompt, sampling)

    async def batch(self) -> None:
        """Most leave in the middle of their prompts; who stays is answered."""
        self._executor.gate.clear()
        streams = [self._submit() for _ in range(self.CLIENTS)]
        await some_chunks(self._executor, self._dice)
        leaving = self._dice.sample(streams, self.LEAVING)
        wanted = self._taken + self.LEAVING
        for stream in leaving:
            self._gateway.cancel(self._decode.incarnation, stream)
        await until(lambda: self._taken == wanted, "the cancels to be taken")
        self._executor.gate.set()
        for stream in streams:
            reason = (await stream.end()).reason
            assert reason is FinishReason.CANCELLED or stream not in leaving, reason
            assert reason is FinishReason.LENGTH or stream in leaving, reason
            assert stream.tokens == output_of(stream.submit.token_ids, len(stream.tokens))
        await self._deployment.quiet()
        self._gateway.streams.clear()
        self._executor.steps.clear()
