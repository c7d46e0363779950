"""An endpoint under load: everything that `pdrt bench` does, and the standard set.

    python benchmarks/serve.py --url http://127.0.0.1:8000 --concurrency 1 8   # as pdrt bench
    python benchmarks/serve.py --up --json ours.json                     # starts pdrt up, takes all
    python benchmarks/serve.py --standard --url URL --server PID … --json peer.json   # somebody's
    python benchmarks/serve.py --up --peer peer.json --check             # and holds ours against it

The standard set is three rows (`standard.py`), each three times while others used less than 3 % of
the processors; medians. `--up` adds start, memory and TTFT beside the bare executor. `--generate`
puts transformers' `generate` beside the rows of `pdrt bench`.
"""

from __future__ import annotations

import asyncio
import os
import random
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import local
from bars import Document
from documents import Output, finish
from rows import Attempt, Figures, Row, flat, print_rows, repeat, settle, unclean
from standard import ROWS, Standard

from pdrt.cli.bench.client import Sample
from pdrt.cli.bench.command import run
from pdrt.cli.bench.flags import Settings, parser, settings_of
from pdrt.cli.bench.load import Run, Shape, completion_body
from pdrt.cli.bench.machine import cpu_shares, cpu_times
from pdrt.cli.bench.summary import Summary, summarize
from pdrt.cli.flags import Parser
from pdrt.errors import ConfigError, PdrtError

LOCAL_ROWS = ("start", "memory", *local.BARE_PROMPTS)


def flags() -> Parser:
    """Those of `pdrt bench`, and ours."""
    made = parser()
    made.prog, made.description, made.epilog = "serve.py", __doc__, None
    add = made.add_argument
    add("--standard", action="store_true", help="the standard set, of any OpenAI endpoint")
    add(
        "--up",
        metavar="FLAGS",
        nargs="?",
        const="",
        help="start pdrt up, one core per worker, with these flags; implies --standard",
    )
    add("--rows", metavar="ROW", nargs="+", choices=(*ROWS, *LOCAL_ROWS), help="only these")
    add("--repeats", metavar="INT", type=int, default=3, help="of each row (default: 3)")
    add("--check", action="store_true", help="print bars; exit code 1 if one falls short")
    add("--peer", metavar="FILE", type=Path, help="what this wrote of the peer, for --check")
    add("--generate", action="store_true", help="add plain generate, batch 1")
    add("--dtype", default="float32", help="of plain generate")
    return made


def main(arguments: list[str]) -> int:
    try:
        parsed = flags().parse(arguments)
        if parsed["up"] is not None:
            return _up(parsed)
        return _standard(parsed) if parsed["standard"] else _bench(parsed)
    except PdrtError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _standard(parsed: dict[str, Any]) -> int:
    standard = Standard(settings_of(parsed))
    names = [name for name in parsed["rows"] or ROWS if name in ROWS]
    rows = asyncio.run(standard.take(names, parsed["repeats"]))
    return _finish(parsed, rows, {"url": standard.root})


def _up(parsed: dict[str, Any]) -> int:
    """All but the last start are only timed."""
    local.stop_when_told()
    given, repeats = shlex.split(parsed["up"]), parsed["repeats"]
    wanted = parsed["rows"] or (*ROWS, *LOCAL_ROWS)
    starts: list[Attempt] = []
    for _ in range(repeats - 1 if "start" in wanted else 0):
        with _started(given, starts):
            pass
    with _started(given, starts) as up:
        parsed |= {"url": up.url, "server": list(up.server)}
        standard = Standard(settings_of(parsed))
        rows = asyncio.run(_rows_of(up, standard, wanted, repeats))
    if "start" in wanted:
        rows.append(settle("start", starts, repeats))
    return _finish(parsed, rows, {"up": shlex.join(up.flags), "command": local.command()})


class _started(local.Up):
    """An `Up` whose start is noted."""

    def __init__(self, given: list[str], starts: list[Attempt]) -> None:
        super().__init__(given)
        self._starts = starts

    def __enter__(self) -> local.Up:
        before = cpu_times(())
        super().__enter__()
        # Read with its processes known: what they used since is theirs.
        after = cpu_times(self.server)
        figures = {"ready_seconds": self.ready_seconds}
        self._starts.append(Attempt(figures, cpu_shares(before, after)))
        return self


async def _rows_of(
    up: local.Up, standard: Standard, wanted: tuple[str, ...], repeats: int
) -> list[Row]:
    rows = await standard.take([name for name in ROWS if name in wanted], repeats)
    layout = standard.layout()
    assert layout is not None, "our own gateway has a status"
    if "memory" in wanted:  # whoever else computes does not change it
        figures = up.memory(layout)
        rows.append(Row("memory", figures, True, (Attempt(figures, None),)))
    names = [name for name in local.BARE_PROMPTS if name in wanted]
    if names:
        bare = local.Bare(up, layout.dtype)
        rows += [
            await repeat(name, partial(_compare, bare, standard, name), up.server, repeats)
            for name in names
        ]
        bare.close()
    return rows


async def _compare(bare: local.Bare, standard: Standard, name: str, attempt: int) -> Figures:
    return await bare.compare(standard, local.bodies(standard, name, attempt))


def _finish(parsed: dict[str, Any], rows: list[Row], detail: dict[str, Any]) -> int:
    print_rows(rows)
    path = Path(parsed["json"]) if parsed["json"] else None
    return finish(
        Document("serve", flat(rows), unclean(rows)),
        {**detail, "rows": rows},
        Output(path, parsed["check"], parsed["peer"]),
    )


def _bench(parsed: dict[str, Any]) -> int:
    code = run(parsed)
    if parsed["generate"]:
        settings = settings_of(parsed)
        for prompt_tokens in settings.prompt_tokens:
            s = generate(settings, prompt_tokens, parsed["dtype"])
            print(
                f"generate b1  prompt {prompt_tokens}  TTFT {s.ttft_ms.p50:.0f} ms  "
                f"ITL {s.itl_ms.p50:.1f} ms  {s.output_tokens_per_second:.1f} tok/s"
            )
    return code


def generate(settings: Settings, prompt_tokens: int, dtype: str) -> Summary:
    """The same requests through transformers' `generate`, batch 1, one thread."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    from pdrt.model.fetch import resolve_model

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        resolve_model(settings.model, print), dtype=getattr(torch, dtype), local_files_only=True
    )

    class Clock(BaseStreamer):
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    count, draw, samples = settings.output_tokens, random.Random(settings.seed), list[Sample]()
    shape = Shape(settings.model, prompt_tokens, count, settings.vocabulary, ignore_eos=True)
    began = time.perf_counter()
    for _ in range(settings.requests):
        ids = torch.tensor([completion_body(shape, draw)["prompt"]])
        clock, sent_at = Clock(), time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            streamer=clock,
            pad_token_id=0,
        )
        times = tuple(clock.times[1:])  # the first put is the prompt itself
        samples.append(Sample(sent_at, time.perf_counter(), times, prompt_tokens, count))
    return summarize(Run(tuple(samples), time.perf_counter() - began), settings.slo)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
