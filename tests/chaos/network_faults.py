"""What can happen between hosts. Each fault does it to one of them and returns how to undo it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pdrt.cli.torture.network import Way
from tests.chaos.cluster import SILENCE_SECONDS, Cluster
from tests.chaos.hosts import Hosts
from tests.chaos.kinds import LONG_SECONDS, SHORT_SECONDS, Fault, Heal, Kind

LOSS_SHARE = 0.1
LOSS_SECONDS = 4.0
DELAY_SECONDS = 0.2


def cut(ways: Sequence[Way] = tuple(Way), share: float = 1.0) -> Fault:
    """Packets of one host are lost: on the way in, on the way out, or both."""

    def inject(cluster: Cluster, name: str, dice: random.Random) -> Heal:
        hosts = _hosts(cluster)
        hosts.cut(name, ways, share)

        async def heal() -> None:
            hosts.mend(name, ways, share)

        return heal

    return inject


def delay(cluster: Cluster, name: str, dice: random.Random) -> Heal:
    """Everything that it sends and is answered over its own connections takes longer."""
    return _relayed(cluster, name, f"delay {DELAY_SECONDS}", "delay 0")


def half_open(cluster: Cluster, name: str, dice: random.Random) -> Heal:
    """The far side of its connections is gone, and it does not know."""
    return _relayed(cluster, name, "forget", "tell")


def _relayed(cluster: Cluster, name: str, harm: str, undo: str) -> Heal:
    relay = _hosts(cluster).relays[name]
    relay.tell(harm)

    async def heal() -> None:
        relay.tell(undo)

    return heal


def _hosts(cluster: Cluster) -> Hosts:
    assert isinstance(cluster, Hosts), "faults between hosts need hosts"
    return cluster


def _kinds() -> list[Kind]:
    kinds = []
    for role in ("prefill", "decode", "gateway"):
        kinds += [
            Kind(f"lose packets of {role}", cut(share=LOSS_SHARE), role, LOSS_SECONDS),
            Kind(f"cut {role} off shortly", cut(), role, SHORT_SECONDS),
            Kind(f"cut {role} off for long", cut(), role, LONG_SECONDS),
            Kind(f"{role} hears nobody", cut([Way.IN]), role, LONG_SECONDS),
            Kind(f"nobody hears {role}", cut([Way.OUT]), role, LONG_SECONDS),
        ]
    for role in ("prefill", "decode"):
        kinds += [
            Kind(f"delay {role}", delay, role, SILENCE_SECONDS),
            Kind(f"half-open connections of {role}", half_open, role, SILENCE_SECONDS),
        ]
    return kinds


HOST_KINDS = {kind.name: kind for kind in _kinds()}
SHORT_HOST_ROUND = (
    ("cut prefill off for long", "delay decode"),
    ("nobody hears decode", "lose packets of prefill"),
    ("half-open connections of prefill", "kill decode"),
    ("prefill hears nobody", "half-open connections of decode", "cut gateway off shortly"),
)
"""Waves of kinds, as `faults.SHORT_ROUND`."""
