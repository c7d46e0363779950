"""`pdrt bench`: TTFT, ITL, TPOT, throughput and goodput of any OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from pdrt.cli.bench.client import Sample, send
from pdrt.cli.bench.flags import Settings, parser, settings_of
from pdrt.cli.bench.load import (
    Body,
    Load,
    Run,
    Send,
    Shape,
    chat_body,
    closed_loop,
    completion_body,
    open_loop,
    poisson_times,
)
from pdrt.cli.bench.machine import cpu_shares, cpu_times
from pdrt.cli.bench.report import Row, table, write_json
from pdrt.cli.bench.summary import summarize

PIPE_WIDTH = 160
"""Columns where there is no terminal to fit."""


def bench(arguments: Sequence[str]) -> int:
    """0 if every request was served, 1 if some failed."""
    return run(parser().parse(arguments))


def run(flags: Mapping[str, Any]) -> int:
    """`bench`, of parsed flags."""
    settings = settings_of(flags)
    rows = measure(settings)
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    console.print(table(rows, settings.slo))
    if flags["json"]:
        write_json(Path(flags["json"]), settings, rows)
    return int(any(row.summary.failed for row in rows))


def measure(settings: Settings) -> list[Row]:
    """Every row, one after the other."""
    return [
        asyncio.run(_row(settings, load, _shape(settings, prompt_tokens)))
        for prompt_tokens in settings.prompt_tokens
        for load in settings.loads
    ]


def _shape(settings: Settings, prompt_tokens: int) -> Shape:
    return Shape(
        settings.model,
        prompt_tokens,
        settings.output_tokens,
        settings.vocabulary,
        settings.ignore_eos,
    )


async def _row(settings: Settings, load: Load, shape: Shape) -> Row:
    draw = random.Random(f"{settings.seed} {shape.prompt_tokens} {load.name}")
    make = chat_body if settings.target.kind == "chat" else completion_body

    async def submit(body: Body) -> Sample:
        return await send(settings.target, body)

    name = f"{load.name}, prompts of {shape.prompt_tokens} tokens"
    _progress(f"{name}: warming up")
    for _ in range(settings.warmup):
        await submit(make(shape, draw))
    count = max(settings.requests, 2 * (load.concurrency or 0))
    bodies = [make(shape, draw) for _ in range(count)]
    _progress(f"{name}: {count} requests")
    before = cpu_times(settings.server)
    run = await _run(load, submit, bodies, draw)
    cpu = cpu_shares(before, cpu_times(settings.server))
    return Row(load, shape, summarize(run, settings.slo), cpu)


def _progress(text: str) -> None:
    """On stderr: what is printed stays what it is for programs."""
    print(text, file=sys.stderr, flush=True)


async def _run(load: Load, submit: Send, bodies: list[Body], draw: random.Random) -> Run:
    if load.rate is not None:
        return await open_loop(submit, bodies, poisson_times(load.rate, len(bodies), draw))
    assert load.concurrency is not None
    return await closed_loop(submit, bodies, load.concurrency)
