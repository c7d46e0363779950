"""What sharing a model over ranks costs and gains: `python benchmarks/tensor_parallel.py`.

The same steps over one rank and over several, each rank on a core of its own, taken in turn. Beside
them stands what a step's sums take when nothing is computed between them: the rest of the
difference to a perfect share is computed twice, or not divided. Random weights, whose heads divide.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
from bars import Document
from documents import Output, add_flags, finish
from executor import Case
from rows import Figures, Row, print_rows, repeat

from pdrt.config import DeviceConfig, ModelConfig
from pdrt.model.cgroup import cpu_quota
from pdrt.model.collectives import RankPlace, join
from pdrt.model.executor import Executor
from pdrt.model.fetch import resolve_model
from pdrt.model.rank_executor import RankExecutor
from pdrt.model.resources import parse_id_list, share_device

CASES = (Case("decode_1", 256, 1), Case("decode_8", 256, 8), Case("prefill_256", 256))
HEADS, KV_HEADS = 8, 4
"""Instead of SmolLM2's nine and three: they divide by two and four."""
POOL_BYTES = 2**28
SECONDS_MAX = 120.0


class Sums(msgspec.Struct, frozen=True):
    """The sums of a step."""

    count: int
    width: int
    """Elements per token."""
    rounds: int


class Part(msgspec.Struct, frozen=True):
    """What another rank is started with."""

    model: ModelConfig
    device: DeviceConfig
    place: RankPlace
    sums: Sums | None = None
    """Computes these instead of steps."""


def model_of(directory: Path, into: Path) -> ModelConfig:
    """A model of the given one's shape, except for its heads, with random weights."""
    shutil.copytree(directory, into, ignore=shutil.ignore_patterns("*.safetensors"))
    path = into / "config.json"
    config = json.loads(path.read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": head_dim}
    path.write_text(json.dumps({**config, **heads}))
    return ModelConfig(
        model=str(into), load_format="dummy", kv_cache_memory_bytes=POOL_BYTES, max_model_len=1024
    )


def serve(part: Part, frames: BinaryIO) -> None:
    """Another rank: takes part in every step whose description arrives, or in sums."""
    if part.sums is not None:
        add(part.sums, part)
        return
    executor = RankExecutor.load(part.model, part.device, lambda text: None, part.place)
    while size := frames.read(4):
        executor.step_blocking(frames.read(int.from_bytes(size, "little")))


@contextmanager
def ranks_of(
    model: ModelConfig, ranks: int, rendezvous: Path, sums: Sums | None = None
) -> Iterator[tuple[Part, list[subprocess.Popen[bytes]]]]:
    """The leader's part, and the processes of the others."""
    whole = DeviceConfig(device="cpu", tensor_parallel_size=ranks)
    devices = share_device(whole, os.sched_getaffinity(0), cpu_quota())
    parts = [
        Part(model, device, RankPlace(rank, ranks, str(rendezvous), SECONDS_MAX), sums)
        for rank, device in enumerate(devices)
    ]
    others = [_start(part) for part in parts[1:]]
    try:
        yield parts[0], others
    finally:
        for other in others:
            other.kill()
            other.wait()


def _start(part: Part) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--part", msgspec.json.encode(part).decode()]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def _tell(others: list[subprocess.Popen[bytes]], body: bytes) -> None:
    for other in others:
        assert other.stdin is not None
        other.stdin.write(len(body).to_bytes(4, "little") + body)
        other.stdin.flush()


def measure(alone: Executor, together: Executor, rounds: int) -> Figures:
    """Medians, each round taking every case both ways."""
    steps = {case: (case.step(alone), case.step(together)) for case in CASES}
    times: dict[Case, list[tuple[float, float]]] = {case: [] for case in CASES}
    for number in range(rounds + 1):
        for case, (one, several) in steps.items():
            pair = one(), several()
            if number:  # the first warms up
                times[case].append(pair)
    found: Figures = {}
    for case, pairs in times.items():
        one, several = (statistics.median(taken) for taken in zip(*pairs, strict=True))
        found[f"{case.name}.ms"] = 1e3 * several
        found[f"{case.name}.one_rank_ms"] = 1e3 * one
        found[f"{case.name}.to_one_rank"] = several / one
    return found


def add(sums: Sums, part: Part) -> Figures:
    """Milliseconds of a step's sums with nothing between them, by case; on every rank at once."""
    assert part.device.cpus is not None
    os.sched_setaffinity(0, parse_id_list(part.device.cpus, "--cpus"))
    collectives = join(part.place, torch.device("cpu"))
    found: Figures = {}
    for case in CASES:
        values = torch.zeros(case.batch or case.tokens, sums.width)
        taken: list[float] = []
        for _ in range(sums.rounds):
            started = time.perf_counter()
            for _ in range(sums.count):
                collectives.add(values)
            taken.append(time.perf_counter() - started)
        found[f"{case.name}.sums_ms"] = 1e3 * statistics.median(taken)
    return found


async def run(options: argparse.Namespace, folder: Path) -> list[Row]:
    model = model_of(resolve_model(options.model, print), folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    sums = Sums(2 * config["num_hidden_layers"], config["hidden_size"], options.rounds)

    async def bare(attempt: int) -> Figures:
        meeting = folder / f"sums-{attempt}"
        with ranks_of(model, options.ranks, meeting, sums) as (leader, _):
            return await asyncio.to_thread(add, sums, leader)

    rows = [await repeat("sums", bare, (), options.repeats)]
    with ranks_of(model, options.ranks, folder / "ranks") as (leader, others):
        together = Executor.load(model, leader.device, print, leader.place)
        together.tell_ranks = lambda body: _tell(others, body)
        alone = Executor.load(model, leader.device, print)

        async def steps(_: int) -> Figures:
            return measure(alone, together, options.rounds)

        rows.append(await repeat("steps", steps, (), options.repeats))
        for executor in (alone, together):
            executor.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ModelConfig().model, help="whose shape is taken")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--rounds", type=int, default=12, help="steps per case")
    parser.add_argument("--repeats", type=int, default=3, help="medians of so many clean runs")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    add_flags(parser)
    options = parser.parse_args()
    if options.part is not None:
        serve(msgspec.json.decode(options.part, type=Part), sys.stdin.buffer)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(run(options, Path(folder)))
    print_rows(rows)
    figures: dict[str, float | None] = {}
    for row in rows:
        figures |= row.figures
    disturbed = {name.partition(".")[0] for row in rows if not row.is_clean for name in row.figures}
    return finish(
        Document("tensor_parallel", figures, tuple(sorted(disturbed))),
        {"ranks": options.ranks, "rows": rows},
        Output(options.json, options.check),
    )


if __name__ == "__main__":
    sys.exit(main())
