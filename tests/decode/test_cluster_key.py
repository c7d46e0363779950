"""Gateway, prefill and decode that share a cluster key, and workers that do not."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from pdrt.config import SecurityConfig, WorkerConfig
from pdrt.decode.worker import DecodeWorker
from pdrt.protocol.codec import encode
from pdrt.protocol.gateway_messages import Gone
from pdrt.transfer import channel
from pdrt.transfer.channel import DealerChannel
from pdrt.transfer.cluster_key import read_key, write_new_key
from tests.decode.deployment import (
    FRAME_BYTES,
    PROTOCOL,
    Deployment,
    GatewayPeer,
    Pair,
    until,
)
from tests.prefill.executor import StandInExecutor


@pytest.fixture(autouse=True)
def redial_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "REDIAL_SECONDS", 0.02)


def new_key(folder: Path, name: str) -> SecurityConfig:
    write_new_key(str(folder / name))
    return SecurityConfig(cluster_key=str(folder / name))


def config(gateway: GatewayPeer, security: SecurityConfig) -> WorkerConfig:
    made = Deployment.config_for(gateway.address, PROTOCOL)
    return msgspec.structs.replace(made, security=security)


def refusals(decode: DecodeWorker) -> list[object]:
    return [link["refusal"] for link in decode.links.gateways()]


async def test_a_cluster_serves_its_own_and_refuses_others(tmp_path: Path) -> None:
    ours, theirs = new_key(tmp_path, "ours"), new_key(tmp_path, "theirs")
    gateway = GatewayPeer(key=read_key(ours))
    deployment = Deployment(gateway)
    executors = [StandInExecutor(64) for _ in range(4)]
    prefill = deployment.add_prefill(executors[0], config(gateway, ours))
    decode = deployment.add_decode(executors[1], config(gateway, ours))
    await deployment.paired()
    pair = Pair(deployment, prefill, decode, executors[0], executors[1])
    await pair.serves()

    # Workers with another key and with none: neither gateway nor prefill worker hears of them.
    strangers = [
        deployment.add_decode(executors[2], config(gateway, theirs)),
        deployment.add_decode(executors[3], config(gateway, SecurityConfig())),
    ]
    await until(lambda: all(all(refusals(stranger)) for stranger in strangers), "their refusals")
    assert all("the same --cluster-key" in str(refusals(s)[0]) for s in strangers)
    for stranger in strangers:
        assert stranger.incarnation not in gateway.registers
        stranger.handover.apply(stranger.table.want(prefill.handover.endpoint, time.monotonic()))
        await until(stranger.view.refused_pairs, "why it is not paired")
        (why,) = stranger.view.refused_pairs()
        assert why.startswith(f"{prefill.handover.endpoint}: ") and "--cluster-key" in why
        assert b"pdrt_refused_peers_total{" in stranger.view.render()
        assert stranger.incarnation not in prefill.table.peers.known
    refused = prefill.handover.refused
    await until(lambda: refused["mechanism"] and refused["key"], "both to be counted")
    assert b"pdrt_refused_peers_total{" in prefill.view.render()

    # What a stranger says in a member's name is not heard.
    impostor = DealerChannel(
        f"tcp://{gateway.address}", b"w" + decode.incarnation.to_bytes(8, "big"), print, FRAME_BYTES
    )
    await until(lambda: impostor.refusal, "the refusal")
    assert not impostor.send(encode(Gone(decode.incarnation)))
    impostor.close()
    await pair.serves()
    await deployment.quiet()
    await deployment.close()
