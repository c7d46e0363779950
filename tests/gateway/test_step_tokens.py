"""Tokens of many requests in one frame: each stream gets its own, and nobody speaks for another."""

from __future__ import annotations

import asyncio

from pdrt.protocol.gateway_messages import FinishReason, StepTokens, Submit, Tokens
from tests.gateway.conftest import Deployment

TEXTS = ("one two three", "four five six seven", "eight")


async def test_each_stream_gets_its_own(deployment: Deployment) -> None:
    liar, decode = await deployment.pair()
    outputs = [deployment.ids(text) for text in TEXTS]

    def speak(submit: Submit) -> None:
        if len(decode.submits) < len(TEXTS):
            return
        for index in range(max(map(len, outputs))):
            step = [
                Tokens(submit.request, decode.worker, index, (output[index],), 0)
                for submit, output in zip(decode.submits, outputs, strict=True)
                if index < len(output)
            ]
            # In the name of the other one, and ahead of it.
            lies = tuple(Tokens(tokens.request, decode.worker, index, (3,), 0) for tokens in step)
            liar.send(StepTokens(liar.worker, lies))
            decode.send(StepTokens(decode.worker, tuple(step)))
        for asked in decode.submits:
            decode.finish(asked.request, FinishReason.STOP)

    decode.on_submit = speak
    chats = await asyncio.gather(*(deployment.chat() for _ in TEXTS))
    assert sorted(chat.choices[0].message.content for chat in chats) == sorted(TEXTS)
