"""`pdrt bench`, and plain `generate` of transformers beside it.

    python benchmarks/serve.py --url http://127.0.0.1:8000 --concurrency 1 8
    python benchmarks/serve.py --url ... --generate        # adds transformers' generate, 1 core

Takes the flags of `pdrt bench`. Prompts are random token ids, so that no cache helps.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

from pdrt.cli.bench.client import Sample
from pdrt.cli.bench.command import run
from pdrt.cli.bench.flags import Settings, parser, settings_of
from pdrt.cli.bench.load import Run, Shape, completion_body
from pdrt.cli.bench.summary import Summary, summarize


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


def main(arguments: list[str]) -> int:
    flags = parser()
    flags.add_argument("--generate", action="store_true", help="add plain generate, batch 1")
    flags.add_argument("--dtype", default="float32", help="of plain generate")
    parsed = flags.parse(arguments)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
