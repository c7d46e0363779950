"""A burst of requests takes nothing from handshakes and heartbeats: nobody is taken for lost, and
no request times out."""

from __future__ import annotations

import msgspec
import pytest

from pdrt.config import ProtocolConfig
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.sampling import Sampling
from tests.decode.deployment import (
    PROTOCOL,
    SCHEDULER,
    Deployment,
    GatewayPeer,
    Stream,
    prompt_of,
    until,
)
from tests.prefill.executor import StandInExecutor, output_of

REQUESTS = 2000
REQUESTS_MAX = 5 * REQUESTS
"""Several seconds of them: the second pair was made within one to three."""
DEFAULTS = ProtocolConfig()
PUNCTUAL = msgspec.structs.replace(
    PROTOCOL,
    hello_interval_seconds=DEFAULTS.hello_interval_seconds,
    silence_seconds=DEFAULTS.silence_seconds,
    tick_late_seconds=DEFAULTS.tick_late_seconds,
    unpaired_seconds_max=DEFAULTS.unpaired_seconds_max,
)
"""As the product is, but that nobody is killed: all live in the test's process."""


async def test_two_thousand_requests_at_once_while_workers_shake_hands(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They wait for the first pair, which is made in the middle of them; a second prefill worker
    joins while the queue is long, and it stays long until that one is paired."""
    deployment = Deployment(GatewayPeer())
    scheduler = msgspec.structs.replace(
        SCHEDULER, queue_max=REQUESTS, max_num_seqs=64, max_num_batched_tokens=256
    )
    config = deployment.config(PUNCTUAL, scheduler)
    decode = deployment.add_decode(StandInExecutor(256), config)
    await until(lambda: decode.links.gateways()[0]["gateway"], "its registration")
    streams = [submit(deployment, decode.incarnation, salt) for salt in range(REQUESTS // 2)]
    deployment.add_prefill(StandInExecutor(256), config)
    streams += [
        submit(deployment, decode.incarnation, salt) for salt in range(REQUESTS // 2, REQUESTS)
    ]
    await until(decode.table.usable_endpoints, "the first pair")
    deployment.add_prefill(StandInExecutor(256), config)
    for stream in streams:
        finished = await stream.end()
        assert finished.reason is FinishReason.LENGTH, finished
        prompt = stream.submit.token_ids
        assert stream.tokens == output_of(prompt, stream.submit.sampling.max_tokens)
        if len(decode.table.usable_endpoints()) < 2 and len(streams) < REQUESTS_MAX:
            streams.append(submit(deployment, decode.incarnation, len(streams)))
    assert len(decode.table.usable_endpoints()) == 2, "the one that joined was not kept waiting"
    assert "lost" not in caplog.text
    assert "room failed" not in caplog.text
    await deployment.quiet()
    await deployment.close()


def submit(deployment: Deployment, worker: int, salt: int) -> Stream:
    """Most want one token; each tenth is decoded too."""
    sampling = Sampling(max_tokens=1 if salt % 10 else 3, temperature=0.0)
    return deployment.gateway.submit(worker, prompt_of(3, salt), sampling)  # type: ignore[arg-type]
