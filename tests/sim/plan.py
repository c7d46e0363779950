"""What one seed simulates: the cluster, its load and its faults. Drawn from the seed alone."""

from __future__ import annotations

import random
from enum import Enum

import msgspec

from pdrt.config import ProtocolConfig
from pdrt.kv.layout import KvLayout
from pdrt.protocol.writers import FenceKind

PAGE_SIZE = 4

CONFIG = ProtocolConfig(
    hello_interval_seconds=0.5,
    silence_seconds=2.0,
    tick_late_seconds=0.5,
    revoke_resend_seconds=0.1,
    revoke_resend_seconds_max=0.8,
    write_seconds_max=2.5,
    fence_after_seconds=6.0,
    kill_lost_after_seconds=2.0,
    retire_seconds_max=2.0,
    quarantine_after_seconds=1.0,
    request_timeout_seconds=9.0,
    rooms_per_request_max=3,
    rooms_max=12,
    decode_incarnations_max=5,
    prefill_endpoints_max=4,
)
"""The defaults' proportions on a shorter scale, so that a run has few idle ticks."""

TICK_SECONDS = 0.15
FAULTS_UNTIL_SECONDS = 10.0
HEAL_SECONDS_MAX = 40.0


class EngineKind(Enum):
    LOCAL = "local"
    """The writer copies; its death is the fence."""
    TCP = "tcp"
    """The receiver copies, after looking at the generation."""
    MOONCAKE = "mooncake"
    """One-sided: what is in the network lands without anybody's help, after the writer's death
    too."""

    @property
    def fence(self) -> FenceKind:
        if self is EngineKind.LOCAL:
            return FenceKind.PROCESS_DEATH
        return FenceKind.RETIRE_GENERATION


class FaultRates(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities per message or write while faults last; all 0 on a calm network."""

    lose: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    """Of a message: overtaken by later ones, as on an old connection."""
    write_slow: float = 0.0
    write_fails: float = 0.0
    """FAILED, clean."""
    write_errors_late: float = 0.0
    """The engine answers an error, and parts still land."""
    write_hangs: float = 0.0
    """Never answered; parts may land late, again, or never."""
    write_lands_wrong: float = 0.0
    """One page of it holds something else, and the engine answers success. Where checksums are
    compared only: else nobody could know."""
    forward_fails: float = 0.0
    reject: float = 0.0
    task_fails: float = 0.0
    engine_refuses: float = 0.0
    engine_hangs: float = 0.0
    """Opening or destroying an instance never ends."""
    segment_hangs: float = 0.0
    """Opening or tearing down a segment never ends."""
    abort: float = 0.0
    """Of a request: its client goes, or it is moved to another decode worker."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    engine: EngineKind
    prefill_workers: int
    decode_workers: int
    prefill_ranks: int
    decode_ranks: int
    kv_heads: int
    prefill_pages: int
    decode_pages: int
    gateways: int
    requests: int
    rates: FaultRates
    faults: int
    """Crashes, stalls, partitions and the like, at random times."""
    is_mixed: bool = False
    """Decode workers offer every engine, and prefill workers have different ones."""
    kv_checksum: bool = False
    local_prefill: bool = False
    """Decode workers compute prompts that no prefill worker takes."""

    @property
    def offered(self) -> tuple[EngineKind, ...]:
        """By every decode worker."""
        return tuple(EngineKind) if self.is_mixed else (self.engine,)

    def have(self, prefill_slot: int) -> tuple[EngineKind, ...]:
        """What the prefill workers of one slot have. The first one has all: it falls back where
        one cannot be opened."""
        if not self.is_mixed:
            return (self.engine,)
        choices = (tuple(EngineKind), (EngineKind.TCP, EngineKind.MOONCAKE), (self.engine,))
        return choices[prefill_slot % len(choices)]

    @property
    def layout(self) -> KvLayout:
        return KvLayout(PAGE_SIZE, self.kv_heads, 1, 1, "bfloat16")


def draw(rng: random.Random) -> Plan:
    """A cluster under every fault."""
    kv_heads = rng.choice((2, 4))
    network = rng.choice((0.0, 0.02, 0.08))
    write = rng.choice((0.01, 0.05, 0.15))
    return Plan(
        engine=rng.choice(tuple(EngineKind)),
        prefill_workers=rng.choice((1, 2, 2, 3)),
        decode_workers=rng.choice((1, 2)),
        prefill_ranks=rng.choice((1, 2, 2, 4)),
        decode_ranks=rng.choice((1, 2, 4)),
        kv_heads=kv_heads,
        prefill_pages=rng.choice((16, 24, 32)),
        decode_pages=rng.choice((16, 24, 32)),
        gateways=rng.choice((1, 2)),
        requests=rng.randint(12, 30),
        rates=FaultRates(
            lose=network,
            duplicate=network,
            delay=rng.choice((0.0, 0.05, 0.15)),
            write_slow=0.1,
            write_fails=write,
            write_errors_late=write,
            write_hangs=write,
            write_lands_wrong=write / 2,
            forward_fails=0.02,
            reject=0.02,
            task_fails=0.01,
            engine_refuses=0.03,
            engine_hangs=rng.choice((0.0, 0.0, 0.02)),
            segment_hangs=rng.choice((0.0, 0.0, 0.01)),
            abort=rng.choice((0.1, 0.4)),
        ),
        faults=rng.randint(3, 16),
        kv_checksum=rng.random() < 0.5,
        local_prefill=rng.random() < 0.5,
        is_mixed=rng.random() < 0.4,
    )


def draw_calm(rng: random.Random) -> Plan:
    """A cluster on which nothing fails: short stalls and aborts only."""
    plan = draw(rng)
    return msgspec.structs.replace(plan, rates=FaultRates(abort=0.3, write_slow=0.1), faults=0)
