"""Step times of the executor beside plain transformers: `python benchmarks/executor.py`.

Both run the same model in the same dtype with the same threads, alternating, so that a busy
machine slows both; the ratio is more reliable than the times. Medians, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from pdrt.config import DeviceConfig, ModelConfig
from pdrt.model.batch import Row
from pdrt.model.executor import Executor
from pdrt.model.fetch import resolve_model
from pdrt.sampling import Sampling

GREEDY = Sampling(max_tokens=1, temperature=0.0)
CONTEXT_TOKENS = 256
DECODE_BATCHES = (1, 8, 32)
PREFILL_TOKENS = (256, 1500)

Step = Callable[[], float]


class Plain:
    """transformers as it comes: SDPA attention over a DynamicCache."""

    def __init__(self, directory: Path, executor: Executor) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=getattr(torch, executor.layout.dtype),
            attn_implementation="sdpa",
            local_files_only=True,
        ).eval()

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, cache: DynamicCache) -> float:
        """One forward and argmax; seconds. Everything beyond it is left out of the time."""
        started = time.perf_counter()
        # By position, as the cache's argument is being renamed.
        logits = self.model(token_ids, None, None, cache, logits_to_keep=1).logits
        logits[:, -1].argmax(dim=-1).tolist()
        return time.perf_counter() - started

    def prefill(self, tokens: int) -> Step:
        ids = torch.randint(3, 1000, (1, tokens))
        return lambda: self.forward(ids, DynamicCache(config=self.model.config))

    def decode(self, batch: int) -> Step:
        config = self.model.config
        shape = (batch, config.num_key_value_heads, CONTEXT_TOKENS - 1, config.head_dim)
        cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            cache.update(*torch.randn(2, *shape, dtype=self.model.dtype).unbind(), layer)
        ids = torch.randint(3, 1000, (batch, 1))

        def step() -> float:
            seconds = self.forward(ids, cache)
            cache.crop(-1)
            return seconds

        return step


def paged_prefill(executor: Executor, tokens: int) -> Step:
    ids = torch.randint(3, 1000, (tokens,)).tolist()
    pages = list(range(executor.layout.pages_for(tokens)))
    rows = [Row(token_ids=ids, start=0, pages=pages, sampling=GREEDY)]
    return lambda: executor.step_blocking(rows).seconds


def paged_decode(executor: Executor, batch: int) -> Step:
    each = executor.layout.pages_for(CONTEXT_TOKENS)
    order = torch.randperm(executor.pages)[: batch * each].view(batch, each).tolist()
    rows = [
        Row(token_ids=[5 + index], start=CONTEXT_TOKENS - 1, pages=pages, sampling=GREEDY)
        for index, pages in enumerate(order)
    ]
    return lambda: executor.step_blocking(rows).seconds


def compare(ours: Step, theirs: Step, rounds: int) -> tuple[float, float]:
    """Median milliseconds of both, run in turn."""
    ours(), theirs()
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    mine, plain = zip(*pairs, strict=True)
    return statistics.median(mine) * 1e3, statistics.median(plain) * 1e3


def measure(executor: Executor, plain: Plain, rounds: int) -> Iterator[dict[str, Any]]:
    for batch in DECODE_BATCHES:
        ours, theirs = compare(paged_decode(executor, batch), plain.decode(batch), rounds)
        yield {"case": f"decode batch {batch}, context {CONTEXT_TOKENS}",
               "pdrt_ms": ours, "transformers_ms": theirs}  # fmt: skip
    for tokens in PREFILL_TOKENS:
        few = max(3, rounds * CONTEXT_TOKENS // (4 * tokens))
        ours, theirs = compare(paged_prefill(executor, tokens), plain.prefill(tokens), few)
        yield {"case": f"prefill {tokens}", "pdrt_ms": ours, "transformers_ms": theirs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ModelConfig().model)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15, help="decode steps per case")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    executor = Executor.load(
        ModelConfig(model=options.model, dtype=options.dtype),
        DeviceConfig(device="cpu", threads=options.threads),
        print,
    )
    plain = Plain(resolve_model(options.model, print), executor)
    print(f"{executor.identity.name}, {executor.layout.dtype}, {options.threads} thread(s)")
    print(f"{'':32}{'pdrt ms':>10}{'transformers ms':>17}{'ratio':>8}")
    results = []
    for result in measure(executor, plain, options.rounds):
        result["ratio"] = result["pdrt_ms"] / result["transformers_ms"]
        results.append(result)
        print("{case:32}{pdrt_ms:10.1f}{transformers_ms:17.1f}{ratio:8.2f}".format(**result))
    if options.json is not None:
        report = {"model": executor.identity.name, "dtype": executor.layout.dtype,
                  "threads": options.threads, "results": results}  # fmt: skip
        options.json.write_text(json.dumps(report, indent=2))
    executor.close()


if __name__ == "__main__":
    main()
