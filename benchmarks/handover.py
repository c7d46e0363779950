"""The life of a room, phase by phase, and how soon pools are whole after a client has gone.

    python benchmarks/handover.py --url http://127.0.0.1:8000

Needs a deployment that nobody else uses: phases are differences of the workers' own histograms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bars import Document
from documents import Output, finish

SAMPLE = re.compile(r"^pdrt_handover_seconds_(sum|count)\{(.*)\} ([0-9.e+-]+)$")
LABEL = re.compile(r'(\w+)="([^"]*)"')


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def phases(url: str) -> dict[tuple[str, str, str], float]:
    """(role, phase, sum or count) over all workers."""
    found: dict[tuple[str, str, str], float] = {}
    for line in get(f"{url}/metrics").splitlines():
        if match := SAMPLE.match(line):
            labels = dict(LABEL.findall(match[2]))
            key = labels["role"], labels["phase"], match[1]
            found[key] = found.get(key, 0.0) + float(match[3])
    return found


def pages_in_use(url: str) -> int:
    workers = json.loads(get(f"{url}/status"))["workers"]
    return sum(w["status"]["pages_total"] - w["status"]["pages"]["free"] for w in workers)


def body(args: argparse.Namespace, draw: random.Random, output: int, stream: bool) -> bytes:
    prompt = [draw.randrange(100, args.vocabulary) for _ in range(args.prompt_tokens)]
    request: dict[str, Any] = {
        "model": args.model,
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    return json.dumps(request).encode()


def complete(args: argparse.Namespace, payload: bytes) -> None:
    request = urllib.request.Request(
        f"{args.url}/v1/completions", payload, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        answer.read()


def room_phases(args: argparse.Namespace) -> dict[str, float]:
    """Mean milliseconds per request, one at a time."""
    draw = random.Random(args.seed)
    complete(args, body(args, draw, 2, False))
    before = phases(args.url)
    for _ in range(args.requests):
        complete(args, body(args, draw, 4, False))
    after = phases(args.url)

    def mean(role: str, phase: str) -> float:
        spent = after[role, phase, "sum"] - before.get((role, phase, "sum"), 0.0)
        return 1e3 * spent / float(args.requests)

    until_first = mean("decode", "prefill")
    waited, computed = mean("prefill", "queued"), mean("prefill", "compute")
    return {
        "waiting for pages on decode": mean("decode", "queued"),
        "waiting on prefill": waited,
        "computing": computed,
        "messages (grant there, first token back)": until_first - waited - computed,
        "copying what compute did not hide": mean("prefill", "drain"),
        "from first token to KV ready on decode": mean("decode", "transfer"),
    }


async def abort(args: argparse.Namespace, payload: bytes, after_tokens: int) -> float:
    """Milliseconds from the client's disconnect until every page is free."""
    parts = urlsplit(args.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
        + payload
    )
    if after_tokens:
        seen = 0
        while seen < after_tokens:
            seen += (await reader.readline()).startswith(b"data: ")
    else:
        await asyncio.sleep(0.05)
    writer.transport.abort()
    gone_at = time.perf_counter()
    while await asyncio.to_thread(pages_in_use, args.url):
        pass
    return 1e3 * (time.perf_counter() - gone_at)


async def abort_times(args: argparse.Namespace) -> dict[str, float]:
    draw, result = random.Random(args.seed + 1), {}
    for name, tokens in (("during prefill", 0), ("while streaming", 3)):
        times = [await abort(args, body(args, draw, 200, True), tokens) for _ in range(10)]
        result[f"disconnect {name} to whole pools, median"] = statistics.median(times)
        result[f"disconnect {name} to whole pools, worst"] = max(times)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--vocabulary", type=int, default=49000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures here")
    args = parser.parse_args()
    figures = {**room_phases(args), **asyncio.run(abort_times(args))}
    for name, milliseconds in figures.items():
        print(f"{milliseconds:10.2f} ms  {name}")
    named = {f"room.{name}": milliseconds for name, milliseconds in figures.items()}
    finish(Document("handover", dict(named)), {"url": args.url}, Output(args.json))


if __name__ == "__main__":
    main()
