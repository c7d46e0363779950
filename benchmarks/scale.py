"""How cost grows: with the prompt, the context, the batch, and with workers.

    python benchmarks/scale.py --json scale.json --plots docs/plots

The executor alone, each point beside its floor; then `pdrt up` with 1 and 2 workers of each role
under a load that keeps all of them busy. Where workers outnumber cores they share them, and the
plot says so. Plots need `pip install pdrt[bench]`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from bars import Document
from documents import Output, add_flags, finish
from executor import POOL_BYTES, Case, load, measure
from floors import Floors
from local import Up, stop_when_told
from rows import Figures, Row, Take, print_rows, repeat
from shapes import model_shape
from standard import Plan, Standard, figures_of, served

from pdrt.cli.bench.flags import parser as bench_parser
from pdrt.cli.bench.flags import settings_of
from pdrt.config import DeviceConfig, ModelConfig
from pdrt.errors import PdrtError
from pdrt.model.fetch import resolve_model

PROMPTS = (128, 256, 512, 1024, 1500, 2048)
CONTEXTS = (256, 512, 1024, 2048, 4096)
BATCHES = (1, 2, 4, 8, 16, 32)
WORKERS = ((1, 1), (2, 1), (1, 2), (2, 2))
"""Prefill and decode workers."""
LOAD = Plan(concurrency=16, requests=48, prompt_tokens=256)


def cases() -> dict[str, tuple[Case, ...]]:
    """By what grows; named `what.size`."""
    return {
        "prompt": tuple(Case(f"prompt.{n}", n) for n in PROMPTS),
        "context": tuple(Case(f"context.{n}", n, batch=8) for n in CONTEXTS),
        "batch": tuple(Case(f"batch.{n}", 256, batch=n) for n in BATCHES),
    }


async def executor_rows(options: argparse.Namespace) -> list[Row]:
    core = max(os.sched_getaffinity(0))
    device = DeviceConfig(device="cpu", threads=1, cpus=str(core))
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    executor = load(options.model, options.dtype, device, POOL_BYTES)
    shape = model_shape(resolve_model(options.model, print), executor.layout)
    floors = Floors(executor.layout.dtype, 1)

    def take(group: Sequence[Case]) -> Take:
        async def once(_: int) -> Figures:
            return measure(tuple(group), executor, shape, floors, options.rounds)

        return once

    rows = [await repeat(name, take(group), (), options.repeats) for name, group in cases().items()]
    floors.close()
    executor.close()
    os.sched_setaffinity(0, allowed)
    return rows


def service_row(options: argparse.Namespace, prefill: int, decode: int) -> Row:
    """Figures named `workers.1P1D.…`."""
    name = f"workers.{prefill}P{decode}D"
    flags = ["--model", options.model, "--dtype", options.dtype]
    flags += ["--prefill-workers", str(prefill), "--decode-workers", str(decode)]
    with Up(flags) as up:
        words = ["--url", up.url, "--server", *up.server]
        standard = Standard(settings_of(bench_parser().parse(words)))

        async def take(attempt: int) -> Figures:
            draw = random.Random(f"{name} {attempt}")
            found = figures_of(served(await standard.run(LOAD, draw)))
            return {f"{name}.{figure}": value for figure, value in found.items()}

        return asyncio.run(repeat(name, take, up.server, options.repeats))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ModelConfig().model)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3, help="steps per point")
    parser.add_argument("--repeats", type=int, default=3, help="medians of so many clean runs")
    parser.add_argument("--plots", metavar="DIRECTORY", type=Path, help="write PNG files here")
    add_flags(parser)
    options = parser.parse_args()
    stop_when_told()
    try:
        rows = asyncio.run(executor_rows(options))
        rows += [service_row(options, prefill, decode) for prefill, decode in WORKERS]
    except PdrtError as error:
        parser.error(str(error))
    print_rows(rows)
    figures: dict[str, float | None] = {}
    for row in rows:
        figures |= row.figures
    cores = len(os.sched_getaffinity(0))
    if options.plots is not None:
        from plots import plot

        plot(figures, cores, options.plots)
    disturbed = tuple(row.name for row in rows if not row.is_clean)
    document = Document("scale", figures, disturbed)
    return finish(document, {"cores": cores, "rows": rows}, Output(options.json, options.check))


if __name__ == "__main__":
    sys.exit(main())
