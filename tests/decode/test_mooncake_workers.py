"""Whole workers over the mooncake engine, with the library: a fence, and too many of them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from pdrt.config import MooncakeConfig, TransferConfig, WorkerConfig
from pdrt.decode.worker import DecodeWorker
from pdrt.errors import ConfigError
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.sampling import Sampling
from pdrt.transfer.mooncake import receiver as receiver_module
from pdrt.transfer.mooncake.library import load
from pdrt.transfer.mooncake.receiver import MooncakeReceiver
from pdrt.transfer.worker_loop import ExitCode
from tests.decode.deployment import Deployment, GatewayPeer, Stream, prompt_of
from tests.prefill.executor import StandInExecutor, output_of

MOONCAKE = MooncakeConfig(mooncake_protocol="tcp")
PAGES = 64
PROMPT = prompt_of(40)

try:
    load(MOONCAKE)
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)


def config_of(deployment: Deployment) -> WorkerConfig:
    engines = TransferConfig(transfer="mooncake")
    return msgspec.structs.replace(deployment.config(), engines=engines, mooncake=MOONCAKE)


@pytest.fixture
async def deployment() -> AsyncIterator[Deployment]:
    """One worker of each role."""
    deployment = Deployment(GatewayPeer())
    deployment.add_prefill(StandInExecutor(PAGES), config_of(deployment))
    deployment.add_decode(StandInExecutor(PAGES), config_of(deployment))
    await deployment.paired()
    yield deployment
    await deployment.quiet()
    await deployment.close()


def submit(deployment: Deployment) -> Stream:
    sampling = Sampling(max_tokens=6, temperature=0.0)
    return deployment.gateway.submit(deployment.decodes[0].incarnation, PROMPT, sampling)


def break_the_next_write(decode: DecodeWorker) -> None:
    """The library refuses it, and says that it has failed: which proves nothing."""
    receiver = decode.rank.parts.receivers["mooncake"]
    assert isinstance(receiver, MooncakeReceiver)
    (instance,) = receiver._open.values()
    assert instance.engine is not None
    assert not instance.engine.batch_unregister_memory([receiver._pool.address])


async def test_an_unsettled_write_costs_one_fence_and_no_request(deployment: Deployment) -> None:
    decode, prefill = deployment.decodes[0], deployment.prefills[0]
    break_the_next_write(decode)
    stream = submit(deployment)
    assert (await stream.end()).reason is FinishReason.LENGTH
    assert stream.tokens == output_of(PROMPT, 6)
    peer = decode.table.pairing.peers[prefill.handover.endpoint]
    assert (peer.engine, peer.newest_generation) == ("mooncake", 2)
    assert decode.table.fences_by_engine == {"mooncake": 1}


async def test_a_worker_with_too_many_tombstones_drains_and_exits(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "TOMBSTONES_MAX", 1)
    decode = deployment.decodes[0]
    break_the_next_write(decode)
    stream = submit(deployment)
    await stream.end()
    assert await deployment.exit_code(decode) is ExitCode.CANNOT_GO_ON
    deployment.forgive(decode)
