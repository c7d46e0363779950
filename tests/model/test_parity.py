"""Each forward against plain transformers in float32: same greedy tokens, logits within 1e-4."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdrt.model.executor import Executor
from tests.model.conftest import LoadExecutor, TinyModel, UseForward
from tests.model.sequences import PageSource, Run, run_step
from tests.model.tiny import FAMILIES

OUTPUT_TOKENS = 22
TOLERANCE = 1e-4
DESCRIPTIONS = {"fused": "fused decoder", "native": "native", "sdpa": "SDPA attention"}
LENGTHS = (37, 5, 18, 70)

Reference = Callable[[list[int]], torch.Tensor]


CASES = [
    *((family, "fused") for family in sorted(FAMILIES.keys() - {"qwen3_moe"})),
    ("qwen3_moe", "native"),
    # A window, and a cap on the scores: what the kernels and SDPA each do in a way of their own.
    *((family, forward) for family in ("mistral", "gemma2") for forward in ("native", "sdpa")),
]
"""A family, and the forward that computes it."""


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    family, forward = request.param
    return family, forward


@pytest.fixture(scope="module")
def directory(case: tuple[str, str], tiny_model: TinyModel) -> Path:
    # Small enough that rounding is not blown up, large enough that every layer tells.
    return tiny_model(case[0], initializer_range=0.12)


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    """Logits (tokens, vocabulary) of a whole sequence, by transformers' eager attention."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )

    def logits(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([tokens]), use_cache=False).logits[0]

    return logits


@pytest.fixture(params=[4, 16])
def executor(
    request: pytest.FixtureRequest,
    case: tuple[str, str],
    directory: Path,
    load_executor: LoadExecutor,
    use_forward: UseForward,
) -> Executor:
    use_forward(case[1])
    executor = load_executor(directory, page_size=request.param)
    assert DESCRIPTIONS[case[1]] in executor.description
    return executor


def make_runs(executor: Executor, lengths: tuple[int, ...] = LENGTHS) -> list[Run]:
    rng = random.Random(sum(lengths))
    source = PageSource(executor)
    vocabulary = executor.identity.vocab_size
    return [
        Run(
            executor,
            source,
            [rng.randrange(3, vocabulary) for _ in range(length)],
            length + OUTPUT_TOKENS,
        )
        for length in lengths
    ]


def decode(executor: Executor, runs: list[Run], tokens: int = OUTPUT_TOKENS) -> None:
    """Decode all runs in one batch until each has `tokens` output tokens."""
    while pending := [run for run in runs if len(run.output) < tokens]:
        run_step(executor, [(run, 1) for run in pending])


def check(run: Run, reference: Reference) -> None:
    """All of a run's logits, and so its greedy tokens, are the reference's."""
    expected = reference(run.tokens[:-1])[run.prompt - 1 :]
    actual = torch.stack(run.logits)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)
    assert run.output == expected.argmax(dim=-1).tolist()


def test_monolithic_prefill(executor: Executor, reference: Reference) -> None:
    for run in make_runs(executor):
        run_step(executor, [(run, len(run.tokens))])
        decode(executor, [run])
        check(run, reference)


@pytest.mark.parametrize("chunk", [7, 13])
def test_chunked_prefill(executor: Executor, reference: Reference, chunk: int) -> None:
    for run in make_runs(executor, (37, 70)):
        while run.computed < run.prompt:
            run_step(executor, [(run, chunk)])
        decode(executor, [run])
        check(run, reference)


def test_ragged_mixed_batch(executor: Executor, reference: Reference) -> None:
    """Decode rows of three lengths and two sequences' chunks share every step."""
    runs = make_runs(executor, (37, 5, 18, 70, 26))
    early, late = runs[:3], runs[3:]
    run_step(executor, [(run, run.prompt) for run in early])
    while any(run.computed < run.prompt for run in late):
        parts = [(run, 11) for run in late if run.computed < run.prompt]
        running = [run for run in late if run.computed >= run.prompt]
        # Chunks first: the executor puts decode rows in front and must sort results back.
        run_step(executor, parts + [(run, 1) for run in early + running])
    decode(executor, runs)
    for run in runs:
        check(run, reference)


def test_one_token_at_a_time(executor: Executor, reference: Reference) -> None:
    """A prompt fed token by token takes the decode path only."""
    (run,) = make_runs(executor, (18,))
    while run.computed < run.prompt:
        run_step(executor, [(run, 1)])
    decode(executor, [run], 4)
    check(run, reference)
