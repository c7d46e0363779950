"""The standard set of an OpenAI endpoint: the same requests for pdrt and for whoever it is held
against, so that two files of it, of one machine and day, can be compared.

64 output tokens at temperature 0, `ignore_eos`, prompts of random words that are never sent twice.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
from collections.abc import Sequence
from functools import partial
from urllib.request import urlopen

import msgspec
from rows import Figures, Row, Take, repeat

from pdrt.cli.bench.client import Sample, send
from pdrt.cli.bench.flags import Settings
from pdrt.cli.bench.load import Body, Run, Shape, closed_loop, completion_body, text_body
from pdrt.cli.bench.summary import Slo, Summary, summarize
from pdrt.cli.http import get_json
from pdrt.errors import PdrtError
from pdrt.kv.layout import KvLayout

PREFIX_TOKENS, PREFIX_REST_TOKENS, PREFIX_PAIRS = 1400, 50, 3
PROBES = 4
"""To find how many words make a prompt of so many tokens."""
SENT = re.compile(r'^pdrt_transfer_bytes_total\{[^}]*role="prefill"[^}]*\} ([0-9.e+-]+)$', re.M)


class Plan(msgspec.Struct, frozen=True):
    """Requests of one row."""

    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int = 64


PLANS = {
    "c1_256": Plan(1, 8, 256),
    "c1_1500": Plan(1, 5, 1500),
    "c8_256": Plan(8, 32, 256),
}
STREAMS = Plan(8, 16, 64, 200)
LONG = Plan(1, 0, 1500, 8)
"""They arrive one after another for as long as the streams run."""
ROWS = (*PLANS, "mixed", "prefix")


class Standard:
    """The set against one endpoint."""

    def __init__(self, settings: Settings) -> None:
        target = settings.target
        scheme = "https" if target.is_https else "http"
        self.root = f"{scheme}://{target.host}:{target.port}{target.path.removesuffix('/v1')}"
        self._settings = settings
        self._words: dict[int, int] = {}
        """By tokens of a prompt: words that make it."""

    async def take(self, names: Sequence[str], repeats: int) -> list[Row]:
        """Rows that the endpoint can serve: `prefix` reads pdrt's own metrics."""
        is_pdrt = self.layout() is not None
        kept = [name for name in names if name != "prefix" or is_pdrt]
        server = self._settings.server
        return [await repeat(name, self.taker(name), server, repeats) for name in kept]

    def taker(self, name: str) -> Take:
        """Takes the row once. Raises PdrtError if a request failed."""
        others: dict[str, Take] = {"mixed": self._mixed, "prefix": self._prefix}
        return others.get(name) or partial(self._plain, name)

    async def send(self, body: Body) -> Sample:
        return await send(self._settings.target, body)

    def shape(self, plan: Plan) -> Shape:
        """Of requests with token ids; with text, its `prompt_tokens` are words."""
        settings = self._settings
        return Shape(
            settings.model, plan.prompt_tokens, plan.output_tokens, settings.vocabulary, True
        )

    async def _text_shape(self, plan: Plan) -> Shape:
        if plan.prompt_tokens not in self._words:
            self._words[plan.prompt_tokens] = await self._calibrate(plan.prompt_tokens)
        words = self._words[plan.prompt_tokens]
        return msgspec.structs.replace(self.shape(plan), prompt_tokens=words)

    async def _calibrate(self, tokens: int) -> int:
        """Words that make `tokens` tokens, as the endpoint itself counts them."""
        draw, words = random.Random(f"calibrate {self._settings.seed} {tokens}"), tokens
        for _ in range(PROBES):
            shape = Shape(self._settings.model, words, 1, self._settings.vocabulary, True)
            found = (await self.send(text_body(shape, draw))).prompt_tokens
            if not found:
                raise PdrtError(f"{self.root} does not say how many tokens a prompt has")
            if abs(found - tokens) <= max(2, tokens // 100):
                break
            words = max(1, round(words * tokens / found))
        return words

    async def run(self, plan: Plan, draw: random.Random) -> Run:
        """After one request that does not count."""
        shape = await self._text_shape(plan)
        await self.send(text_body(shape, draw))
        bodies = [text_body(shape, draw) for _ in range(plan.requests)]
        return await closed_loop(self.send, bodies, plan.concurrency)

    async def _plain(self, name: str, attempt: int) -> Figures:
        draw = random.Random(f"{name} {self._settings.seed} {attempt}")
        return figures_of(served(await self.run(PLANS[name], draw)))

    async def _mixed(self, attempt: int) -> Figures:
        """Streams alone; then streams while long prompts arrive."""
        draw = random.Random(f"mixed {self._settings.seed} {attempt}")
        alone = served(await self.run(STREAMS, draw))
        long_shape = await self._text_shape(LONG)
        async with asyncio.TaskGroup() as tasks:
            over = asyncio.Event()
            arriving = tasks.create_task(self._arrivals(long_shape, draw, over))
            beside = await self.run(STREAMS, draw)
            over.set()
        mixed = served(beside)
        found = {f"alone_{name}": value for name, value in figures_of(alone).items()}
        found |= figures_of(mixed)
        found["long_ttft_p50_ms"] = served(arriving.result()).ttft_ms.p50
        found["itl_p99_to_alone"] = mixed.itl_ms.p99 / alone.itl_ms.p99
        return found

    async def _arrivals(self, shape: Shape, draw: random.Random, over: asyncio.Event) -> Run:
        samples = []
        while not over.is_set():
            samples.append(await self.send(text_body(shape, draw)))
        return Run(tuple(samples), samples[-1].ended_at - samples[0].sent_at)

    async def _prefix(self, attempt: int) -> Figures:
        """Pairs of prompts that share their first tokens, nothing else of them cached."""
        layout = self.layout()
        assert layout is not None
        draw = random.Random(f"prefix {self._settings.seed} {attempt}")
        pairs = [await self._pair(draw) for _ in range(PREFIX_PAIRS)]
        missing = layout.pages_for(PREFIX_TOKENS + PREFIX_REST_TOKENS)
        missing -= PREFIX_TOKENS // layout.page_size
        computed = max(layout.pages_for(s.prompt_tokens - s.cached_tokens) for _, s, _ in pairs)
        sent = max(sent for _, _, sent in pairs) / layout.page_bytes
        first = statistics.median(first.ttft for first, _, _ in pairs)
        second = statistics.median(second.ttft for _, second, _ in pairs)
        return {
            "first_ttft_ms": 1e3 * first,
            "second_ttft_ms": 1e3 * second,
            "ttft_to_first": second / first,
            # Beyond those that are missing.
            "pages_computed": computed - missing,
            "pages_sent": sent - missing,
        }

    async def _pair(self, draw: random.Random) -> tuple[Sample, Sample, float]:
        """Both requests, and the KV bytes that were sent for the second."""
        head = self.shape(Plan(1, 1, PREFIX_TOKENS, 4))
        rest = self.shape(Plan(1, 1, PREFIX_REST_TOKENS, 4))
        prompt, samples, counts = completion_body(head, draw)["prompt"], [], [self._sent_bytes()]
        for _ in range(2):
            tail = completion_body(rest, draw)["prompt"]
            samples.append(await self.send(completion_body(head, draw) | {"prompt": prompt + tail}))
            counts.append(self._sent_bytes())
        served(Run(tuple(samples), 1.0))
        return samples[0], samples[1], counts[2] - counts[1]

    def layout(self) -> KvLayout | None:
        """Of the KV pages; None where the endpoint is not pdrt's."""
        try:
            status = get_json(f"{self.root}/status", self._settings.target.api_key, 10.0).body
            return msgspec.convert(status["workers"][0]["fingerprint"]["layout"], _Layout).layout()
        except (OSError, KeyError, IndexError, TypeError, msgspec.ValidationError):
            return None

    def _sent_bytes(self) -> float:
        with urlopen(f"{self.root}/metrics", timeout=10.0) as answer:
            return sum(map(float, SENT.findall(answer.read().decode())))


class _Layout(msgspec.Struct):
    """As /status shows it: an object."""

    page_size: int
    kv_heads: int
    layers: int
    head_dim: int
    dtype: str

    def layout(self) -> KvLayout:
        return KvLayout(self.page_size, self.kv_heads, self.layers, self.head_dim, self.dtype)


def served(run: Run) -> Summary:
    """Raises PdrtError if a request failed: figures of the others are of another load."""
    summary = summarize(run, Slo())
    if summary.failed:
        raise PdrtError(f"{summary.failed} of {summary.requests} failed: {summary.errors}")
    return summary


def figures_of(summary: Summary) -> Figures:
    """Quantiles in milliseconds."""
    return {
        "ttft_p50_ms": summary.ttft_ms.p50,
        "ttft_p99_ms": summary.ttft_ms.p99,
        "itl_p50_ms": summary.itl_ms.p50,
        "itl_p99_ms": summary.itl_ms.p99,
        "tpot_p50_ms": summary.tpot_ms.p50,
        "output_tokens_per_second": summary.output_tokens_per_second,
        "events_per_token": summary.events_per_token,
    }
