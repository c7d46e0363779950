"""Steps of the executor, each beside its floor: `python benchmarks/executor.py --check`.

The floor of a step is what reading its weights and KV once takes at this machine's bandwidth, or
its arithmetic at this processor's peak, whichever is longer. Both are measured in the same run, in
turn with the steps and with the same threads: a busy machine slows all of them, so that ratios are
more reliable than times. `--transformers` puts plain transformers beside it too, which is slow.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import Callable, Mapping

import msgspec
import torch
from bars import Document
from documents import Output, add_flags, finish
from floors import Floor, Floors
from plain import Plain
from rows import Figures, print_rows, repeat
from rows import Row as Taken
from shapes import ModelShape, model_shape

from pdrt.config import DeviceConfig, ModelConfig
from pdrt.errors import PdrtError
from pdrt.model.batch import Row
from pdrt.model.executor import Executor
from pdrt.model.fetch import resolve_model
from pdrt.sampling import Sampling

GREEDY = Sampling(max_tokens=1, temperature=0.0)
CONTEXT_TOKENS, LONG_CONTEXT_TOKENS = 256, 4096
POOL_BYTES = 2 * 2**30
"""Holds the largest case of a model with 64 KB of KV a token."""
PREFILL_SHARE = 4
"""So many rounds of decode steps are taken for one of prefills, which take longer."""

Step = Callable[[], float]
"""Seconds that it took."""


class Case(msgspec.Struct, frozen=True):
    """Decode steps of `batch` sequences of `tokens` tokens each; a prefill of them for batch 0."""

    name: str
    tokens: int
    batch: int = 0

    def floor(self, shape: ModelShape, floor: Floor) -> float:
        """Seconds."""
        if self.batch == 0:
            return floor.seconds(shape.prefill_bytes(self.tokens), shape.prefill_flops(self.tokens))
        return floor.seconds(
            shape.decode_bytes(self.batch, self.tokens), shape.decode_flops(self.batch, self.tokens)
        )

    def fits(self, executor: Executor) -> bool:
        """Else it is left out, and its bars are missing."""
        pages = max(1, self.batch) * executor.layout.pages_for(self.tokens)
        return pages <= executor.pages and self.tokens < executor.identity.max_model_len

    def step(self, executor: Executor) -> Step:
        rows = decode_rows(executor, self) if self.batch else prefill_rows(executor, self)
        return lambda: executor.step_blocking(rows).seconds


LONG = Case("decode_8_long", LONG_CONTEXT_TOKENS, 8)
SHORT = Case("decode_8", CONTEXT_TOKENS, 8)
DECODE = (Case("decode_1", CONTEXT_TOKENS, 1), SHORT, Case("decode_32", CONTEXT_TOKENS, 32), LONG)
PREFILL = (Case("prefill_256", 256), Case("prefill_1500", 1500))


def prefill_rows(executor: Executor, case: Case) -> list[Row]:
    ids = torch.randint(3, 1000, (case.tokens,)).tolist()
    pages = list(range(executor.layout.pages_for(case.tokens)))
    return [Row(token_ids=ids, start=0, pages=pages, sampling=GREEDY)]


def decode_rows(executor: Executor, case: Case) -> list[Row]:
    """Pages in no order, as after hours of service."""
    each = executor.layout.pages_for(case.tokens)
    order = torch.randperm(executor.pages)[: case.batch * each].view(case.batch, each).tolist()
    return [
        Row(token_ids=[5 + index], start=case.tokens - 1, pages=pages, sampling=GREEDY)
        for index, pages in enumerate(order)
    ]


def load(model: str, dtype: str, device: DeviceConfig, pool_bytes: int) -> Executor:
    """With its pool filled: pages that nobody wrote are read from no memory."""
    config = ModelConfig(model=model, dtype=dtype, kv_cache_memory_bytes=pool_bytes)  # type: ignore[arg-type]
    executor = Executor.load(config, device, _say)
    pool = executor.pool.tensor
    pool.copy_(torch.randn(pool.shape[1:], dtype=pool.dtype).expand_as(pool))
    return executor


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(
    cases: tuple[Case, ...], executor: Executor, shape: ModelShape, floors: Floors, rounds: int
) -> Figures:
    """Medians of all cases, each round taking all of them and the floors in turn."""
    cases = tuple(case for case in cases if case.fits(executor))
    steps = {case: case.step(executor) for case in cases}
    times: dict[Case, list[float]] = {case: [] for case in cases}
    found: list[Floor] = []
    for round_ in range(rounds + 1):
        found.append(floors.measure())
        for case, step in steps.items():
            seconds = step()
            if round_:  # the first warms up
                times[case].append(seconds)
    floor = Floor(
        statistics.median(each.bytes_per_second for each in found),
        statistics.median(each.flops_per_second for each in found),
    )
    medians = {case: statistics.median(taken) for case, taken in times.items()}
    return figures_of(medians, shape, floor)


def figures_of(times: Mapping[Case, float], shape: ModelShape, floor: Floor) -> Figures:
    """`times` in seconds. Pure."""
    found = {
        "read_gb_per_second": floor.bytes_per_second / 1e9,
        "gflops_per_second": floor.flops_per_second / 1e9,
    }
    for case, seconds in times.items():
        least = case.floor(shape, floor)
        found |= {
            f"{case.name}.ms": 1e3 * seconds,
            f"{case.name}.floor_ms": 1e3 * least,
            f"{case.name}.to_floor": seconds / least,
        }
    if LONG in times:
        added = shape.decode_bytes(8, LONG.tokens) - shape.decode_bytes(8, SHORT.tokens)
        least = added / floor.bytes_per_second
        found[f"{LONG.name}.added_to_floor"] = (times[LONG] - times[SHORT]) / least
    return found


def compare(executor: Executor, plain: Plain, cases: tuple[Case, ...], rounds: int) -> Figures:
    """Beside transformers as it comes, in turn."""
    found = {}
    for case in cases:
        ours = case.step(executor)
        theirs = plain.decode(case.batch, case.tokens) if case.batch else plain.prefill(case.tokens)
        ours(), theirs()
        pairs = [(ours(), theirs()) for _ in range(rounds)]
        mine, other = (statistics.median(taken) for taken in zip(*pairs, strict=True))
        found[f"{case.name}.ms"] = 1e3 * mine
        found[f"{case.name}.transformers_ms"] = 1e3 * other
        found[f"{case.name}.to_transformers"] = mine / other
    return found


async def run(options: argparse.Namespace, executor: Executor) -> tuple[list[Taken], str]:
    """All rows, and whose floors they have."""
    directory = resolve_model(options.model, _say)
    shape = model_shape(directory, executor.layout)
    floors = Floors(executor.layout.dtype, torch.get_num_threads())
    _say(f"floors: {floors.note}")
    few = max(3, options.rounds // PREFILL_SHARE)

    async def decode(_: int) -> Figures:
        return measure(DECODE, executor, shape, floors, options.rounds)

    async def prefill(_: int) -> Figures:
        return measure(PREFILL, executor, shape, floors, few)

    async def beside(_: int) -> Figures:
        return compare(executor, plain, (*DECODE[:3], *PREFILL), few)

    found = [
        await repeat("decode", decode, (), options.repeats),
        await repeat("prefill", prefill, (), options.repeats),
    ]
    if options.transformers:
        plain = Plain(directory, executor.layout.dtype)
        found.append(await repeat("transformers", beside, (), 1))
    floors.close()
    return found, floors.note


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ModelConfig().model)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1, help="one core each (default: 1)")
    parser.add_argument("--pool-bytes", type=int, default=POOL_BYTES)
    parser.add_argument("--rounds", type=int, default=12, help="decode steps per case")
    parser.add_argument("--repeats", type=int, default=3, help="medians of so many clean runs")
    parser.add_argument("--transformers", action="store_true", help="put plain transformers beside")
    add_flags(parser)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[-options.threads :]
    device = DeviceConfig(device="cpu", threads=len(cores), cpus=",".join(map(str, cores)))
    os.sched_setaffinity(0, cores)  # the floors' threads, and those of plain transformers
    torch.set_num_threads(len(cores))
    try:
        executor = load(options.model, options.dtype, device, options.pool_bytes)
    except PdrtError as error:
        parser.error(str(error))
    rows, note = asyncio.run(run(options, executor))
    executor.close()
    layout = executor.layout
    print(f"{executor.identity.name}, {layout.dtype}, {len(cores)} thread(s); {note}")
    print_rows(rows)
    # Figures carry their case's name already; rows only say what was taken together.
    figures: dict[str, float | None] = {}
    for row in rows:
        figures |= row.figures
    disturbed = {name.partition(".")[0] for row in rows if not row.is_clean for name in row.figures}
    detail = {"model": executor.identity.name, "dtype": layout.dtype, "threads": len(cores)}
    return finish(
        Document("executor", figures, tuple(sorted(disturbed))),
        {**detail, "floors": note, "rows": rows},
        Output(options.json, options.check),
    )


if __name__ == "__main__":
    sys.exit(main())
