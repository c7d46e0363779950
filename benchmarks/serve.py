"""TTFT, ITL and throughput of any OpenAI-compatible endpoint, and of plain `generate` beside it.

    python benchmarks/serve.py --url http://127.0.0.1:8000 --concurrency 1 8
    python benchmarks/serve.py --url ... --generate        # adds transformers' generate, 1 core

Closed loop: each of C clients sends its next request when the last one ended. Prompts are random
token ids, so that no cache helps. Reports the share of CPU time that others used: beyond a few
per cent the figures mean little.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


class Sample:
    """One streamed request."""

    def __init__(self, sent_at: float, token_times: list[float]) -> None:
        self.ttft = token_times[0] - sent_at
        self.gaps = [b - a for a, b in itertools.pairwise(token_times)]
        self.tokens = len(token_times)


async def stream(url: str, body: dict[str, Any]) -> Sample:
    """Send one streaming completion over a fresh connection; note when each token came."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    sent_at = time.perf_counter()
    writer.write(head.encode() + payload)
    times: list[float] = []
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError((status + await reader.read()).decode(errors="replace"))
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            choices = json.loads(line[6:])["choices"]
            if choices and choices[0]["finish_reason"] is None:
                times.append(time.perf_counter())
    writer.close()
    return Sample(sent_at, times)


async def closed_loop(args: argparse.Namespace, concurrency: int, prompt: int) -> dict[str, float]:
    """All requests of one row of the table."""
    draw = random.Random(args.seed * 1000 + concurrency)
    count = max(args.requests, 2 * concurrency)
    bodies = [
        {
            "model": args.model,
            "prompt": [draw.randrange(100, args.vocabulary) for _ in range(prompt)],
            "max_tokens": args.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        for _ in range(count)
    ]
    samples: list[Sample] = []

    async def client() -> None:
        while bodies:
            samples.append(await stream(args.url, bodies.pop()))

    busy, total = cpu_times()
    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    seconds = time.perf_counter() - began
    busy_after, total_after = cpu_times()
    return {
        **summary(samples, seconds),
        "cpu_busy_percent": 100 * (busy_after - busy) / (total_after - total),
    }


def summary(samples: list[Sample], seconds: float) -> dict[str, float]:
    gaps = sorted(gap for s in samples for gap in s.gaps)
    ttfts = sorted(s.ttft for s in samples)
    return {
        "ttft_ms_p50": 1e3 * statistics.median(ttfts),
        "ttft_ms_max": 1e3 * ttfts[-1],
        "itl_ms_p50": 1e3 * statistics.median(gaps),
        "itl_ms_p99": 1e3 * gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))],
        "tokens_per_second": sum(s.tokens for s in samples) / seconds,
    }


def cpu_times() -> tuple[float, float]:
    """(busy, total) ticks of the whole machine."""
    fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return sum(fields) - fields[3] - fields[4], sum(fields)


def generate(args: argparse.Namespace, prompt: int) -> dict[str, float]:
    """The same request through transformers' `generate`, batch 1, one thread."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    from pdrt.model.fetch import resolve_model

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        resolve_model(args.model, print), dtype=getattr(torch, args.dtype), local_files_only=True
    )

    class Clock(BaseStreamer):
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    draw, samples = random.Random(args.seed), []
    began = time.perf_counter()
    for _ in range(args.requests):
        ids = torch.tensor([[draw.randrange(100, args.vocabulary) for _ in range(prompt)]])
        clock, sent_at = Clock(), time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=args.output_tokens,
            max_new_tokens=args.output_tokens,
            streamer=clock,
            pad_token_id=0,
        )
        samples.append(Sample(sent_at, clock.times[1:]))  # the first put is the prompt itself
    return summary(samples, time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[256])
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=49000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--generate", action="store_true", help="add plain generate, batch 1")
    parser.add_argument("--dtype", default="float32", help="of plain generate")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for prompt in args.prompt_tokens:
        for concurrency in args.concurrency:
            row = asyncio.run(closed_loop(args, concurrency, prompt))
            rows.append({"what": f"endpoint c{concurrency}", "prompt": prompt, **row})
        if args.generate:
            rows.append({"what": "generate b1", "prompt": prompt, **generate(args, prompt)})
    for row in rows:
        print("  ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{v}" for k, v in row.items()))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
