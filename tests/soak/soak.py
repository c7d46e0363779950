"""Epochs: clients that come and go, a fault, and then everything compared and looked at."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

from tests.chaos.cluster import Cluster
from tests.chaos.faults import strike
from tests.chaos.load import Load
from tests.chaos.proc import Use
from tests.chaos.report import Report
from tests.e2e.reference import Reference
from tests.soak.questions import CHUNK_TOKENS, PAGE_TOKENS, Questions

CLIENTS = 8
FAULTS = (
    *("kill prefill", "kill decode", "leave prefill", "leave decode"),
    *("stop prefill shortly", "stop decode shortly"),
)
"""Of `tests.chaos.faults`: those that no client may notice but by the time that it takes."""
FDS_GROWTH_MAX = 16
THREADS_GROWTH_MAX = 8
ANONYMOUS_GROWTH_MAX = 96 * 2**20
"""Bytes. From a process's first epoch on, however many follow: allocators keep what a peak took."""
QUESTIONS_EPOCHS = 10
"""Epochs that ask the same: their answers take seconds to compute."""
COUNTERS = (
    *("pdrt_kv_checksum_pages_total", "pdrt_transfer_bytes_total", "pdrt_preemptions_total"),
    *("pdrt_room_ends_total", "pdrt_fences_total", "pdrt_prefix_cache_tokens_total"),
)
FLAGS = {
    "--kv-checksum": "true",
    "--page-size": str(PAGE_TOKENS),
    "--max-model-len": "320",
    "--max-num-batched-tokens": str(CHUNK_TOKENS),
}
POOL_PAGES = 32
"""Little room: prefixes are evicted, sequences preempted."""


def pool_bytes(model: Path) -> int:
    """Of `POOL_PAGES` pages in float32."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    values = 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_dim
    return POOL_PAGES * PAGE_TOKENS * values * 4


def soak_cluster(folder: Path, model: Path) -> Cluster:
    """Two workers of each role whose pages are compared as they land, and a gateway."""
    flags = FLAGS | {"--kv-cache-memory-bytes": str(pool_bytes(model))}
    both = [f"{role}:{n}={value}" for n, value in flags.items() for role in ("prefill", "decode")]
    return Cluster(folder, str(model), flags=both)


class Soak:
    """One cluster through any number of epochs."""

    def __init__(self, cluster: Cluster, reference: Reference) -> None:
        self._report = Report()
        self._cluster = cluster
        self._reference = reference
        self._questions: Questions | None = None
        self._began_at = time.monotonic()
        self._first_uses: dict[int, Use] = {}
        """Of each process that lives, when it was first idle after an epoch."""
        self._counts: dict[tuple[str, ...], float] = {}
        """The last that each worker said of its counters, those included that have died since."""

    async def begin(self) -> None:
        self._cluster.start_all()
        self._questions = Questions(self._reference, 0)  # while they start
        await self._cluster.complete()

    async def epoch(self, seed: int, seconds: float, fault: str) -> None:
        """Raises AssertionError when something that must be true is not."""
        if seed % QUESTIONS_EPOCHS == 0 and seed:
            self._questions = Questions(self._reference, seed)
        questions = self._questions
        assert questions is not None, "begin first"
        load = Load(self._cluster.url, questions, questions.expected, seed)
        over_at = time.monotonic() + seconds
        await load.begin(CLIENTS)
        try:
            await self._harm(fault, random.Random(f"fault {seed}"), seconds)
            await asyncio.sleep(max(0.0, over_at - time.monotonic()))
        finally:
            await load.end()
            self._report.tally.add(load.tally)
        assert not load.tally.lost, load.tally.lost[:8]
        assert not load.tally.broken, load.tally.broken
        self._report.whole(await self._cluster.whole())
        self._read_counters()
        self._look_for_leaks()
        self._report.rounds += 1

    async def _harm(self, fault: str, dice: random.Random, seconds: float) -> None:
        await asyncio.sleep(seconds * dice.uniform(0.2, 0.5))
        for injury in strike(self._cluster, fault, dice):
            await asyncio.sleep(injury.kind.hold_seconds)
            await injury.heal()
            self._report.fault(fault, await self._cluster.complete())

    def _read_counters(self) -> None:
        for name, labels, value in self._cluster.metrics():
            if name in COUNTERS:
                key = (name, *(f"{k}={labels[k]}" for k in sorted(labels)))
                self._counts[key] = value
        assert self._count("pdrt_kv_checksum_pages_total", "result=different") == 0
        assert self._count("pdrt_fences_total") == 0, "a worker was killed for its pages"

    def _count(self, name: str, label: str | None = None) -> float:
        """Over all workers there have been."""
        return sum(
            value
            for key, value in self._counts.items()
            if key[0] == name and (label is None or label in key)
        )

    def _look_for_leaks(self) -> None:
        """Compares every process with itself."""
        uses = self._cluster.uses()
        for pid, use in uses.items():
            first = self._first_uses.setdefault(pid, use)
            grown = Use(
                fds=use.fds - first.fds,
                threads=use.threads - first.threads,
                anonymous_bytes=use.anonymous_bytes - first.anonymous_bytes,
            )
            self._report.growth(grown)
            what = f"{self._cluster.name_of(pid)}: {first} became {use}"
            assert grown.fds <= FDS_GROWTH_MAX, what
            assert grown.threads <= THREADS_GROWTH_MAX, what
            assert grown.anonymous_bytes <= ANONYMOUS_GROWTH_MAX, what
        self._first_uses = {pid: self._first_uses[pid] for pid in uses}

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        reasons = {label for key in self._counts for label in key if label.startswith("reason=")}
        return self._report.facts() | {
            "seconds": round(time.monotonic() - self._began_at, 1),
            "pages_compared": self._count("pdrt_kv_checksum_pages_total", "result=equal"),
            "pages_different": self._count("pdrt_kv_checksum_pages_total", "result=different"),
            "bytes_landed": self._count("pdrt_transfer_bytes_total", "role=decode"),
            "cached_tokens": self._count("pdrt_prefix_cache_tokens_total", "result=hit"),
            "preemptions": self._count("pdrt_preemptions_total"),
            "rooms_ended": {
                label.removeprefix("reason="): self._count("pdrt_room_ends_total", label)
                for label in sorted(reasons)
            },
        }
