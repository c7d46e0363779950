"""Models shared by ranks in real processes: what one rank computes alone, token for token.

Float32, all families that can be split, by whichever forward they take; prompts in chunks, then
decoding in one batch, as tests/model/test_families.py has them.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pdrt.config import ModelConfig
from pdrt.errors import ModelError, RanksLost
from pdrt.model.batch import Row
from pdrt.model.collectives import RankPlace
from pdrt.model.executor import Executor
from pdrt.model.fetch import DEFAULT_MODEL, resolve_model
from pdrt.model.fused_structure import FUSED_TYPES
from pdrt.model.native.library import load_kernels
from pdrt.model.rank_step import decode_step, encode_step
from pdrt.model.resources import cpu_flags
from pdrt.model.sharding import SPLIT_TYPES
from pdrt.sampling import Sampling
from tests.model.families import FAMILIES, Family
from tests.model.rank_process import ONE_CORE, Failed
from tests.model.sequences import GREEDY, PageSource, Run, run_step
from tests.model.shared import Shared, handed_over
from tests.model.test_families import TOLERANCE, generate
from tests.model.tiny import write_model

HAS_KERNELS = load_kernels(cpu_flags()) is not None
THREE = {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 100}
"""Divides over one, two and three ranks; the middle of its MLP does not over three."""
SPLIT = [family for family in FAMILIES if family.model_type in SPLIT_TYPES]
ORDINARY = {
    *("llama-tied", "llama-biases", "qwen3", "gemma2", "phi3-partial"),
    *("phi", "mixtral", "qwen2-moe", "starcoder2"),  # through transformers' own forward
}
"""Each way in which a matrix is split, once; the others are slow."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    ranks = Shared(tmp_path_factory.mktemp("ranks"), others=2)
    yield ranks
    ranks.end()


def as_param(family: Family) -> Any:
    is_slow = family.name not in ORDINARY
    return pytest.param(family, id=family.name, marks=[pytest.mark.slow] * is_slow)


def write(directory: Path, config: str = "LlamaConfig", **settings: Any) -> Path:
    write_model(directory, config, {"initializer_range": 0.12, **settings})
    return directory


def assert_same(actual: list[Run], expected: list[Run], tolerance: float = TOLERANCE) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.output == other.output
        torch.testing.assert_close(
            torch.stack(one.logits), torch.stack(other.logits), atol=tolerance, rtol=0
        )


@pytest.mark.parametrize("family", [as_param(family) for family in SPLIT])
def test_a_family_over_two_ranks_is_what_it_is_on_one(
    tmp_path: Path, shared: Shared, family: Family
) -> None:
    directory = write(tmp_path, family.config, **family.settings)
    expected = generate(shared.load(directory, 1, page_size=4))
    executor = shared.load(directory, 2, page_size=4)
    is_fused = executor.description.startswith("fused decoder")
    assert is_fused == (HAS_KERNELS and family.model_type in FUSED_TYPES)
    assert executor.layout.kv_heads == 2 * executor.pool.layout.kv_heads
    assert_same(generate(executor), expected)


def test_all_that_can_be_split_is_compared() -> None:
    assert {family.model_type for family in SPLIT} == SPLIT_TYPES


@pytest.mark.parametrize("config", ["LlamaConfig", "OlmoConfig"])
@pytest.mark.parametrize("kv_heads", [3, 1])
@pytest.mark.parametrize("is_tied", [True, False])
def test_three_ranks(
    tmp_path: Path, shared: Shared, config: str, kv_heads: int, is_tied: bool
) -> None:
    """One KV head is held by all of them; neither vocabulary nor MLP divides by three."""
    settings = {**THREE, "num_key_value_heads": kv_heads, "tie_word_embeddings": is_tied}
    directory = write(tmp_path, config, **settings)
    expected = generate(shared.load(directory, 1))
    executor = shared.load(directory, 3)
    assert executor.identity.vocab_size % 3 != 0
    assert executor.pool.layout.kv_heads == 1
    assert_same(generate(executor), expected)


def test_random_weights_and_shards_are_those_of_one_rank(tmp_path: Path, shared: Shared) -> None:
    write_model(tmp_path, "LlamaConfig", {"initializer_range": 0.12}, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    for load_format in ("auto", "dummy"):
        expected = generate(shared.load(tmp_path, 1, load_format=load_format))
        assert_same(generate(shared.load(tmp_path, 2, load_format=load_format)), expected)


def test_bfloat16(tmp_path: Path, shared: Shared) -> None:
    """Stored so, and computed so by transformers: both can be summed."""
    for config in ("LlamaConfig", "OlmoConfig"):
        directory = write(tmp_path / config, config)
        runs = generate(shared.load(directory, 2, dtype="bfloat16"), (9,))
        expected = generate(shared.load(directory, 1, dtype="bfloat16"), (9,))
        actual, whole = runs[0].logits[0], expected[0].logits[0]
        assert (actual - whole).square().mean().sqrt() < 0.1 * whole.std()


@pytest.mark.parametrize(
    ("kv_heads", "prefill", "decode"),
    [(6, 1, 2), (6, 2, 1), (6, 2, 3), (6, 3, 1), (6, 3, 3), (1, 2, 3), (1, 3, 2)],
)
def test_kv_computed_by_some_ranks_is_read_by_others(
    tmp_path: Path, shared: Shared, kv_heads: int, prefill: int, decode: int
) -> None:
    directory = write(tmp_path, **{**THREE, "num_key_value_heads": kv_heads})
    prompt = list(range(20, 57))
    alone = generate_after(shared.load(directory, 1), prompt)
    executor = shared.load(directory, prefill)
    first = run_of(executor, prompt)
    run_step(executor, [(first, len(prompt))])
    content = shared.read_pages(first.pages)
    executor = shared.load(directory, decode)
    run = run_of(executor, prompt)
    shared.write_pages(run.pages, handed_over(executor, content, decode))
    run.tokens, run.computed = list(first.tokens), first.computed
    assert decode_on(executor, run) == alone


def run_of(executor: Executor, prompt: list[int]) -> Run:
    return Run(executor, PageSource(executor), prompt, len(prompt) + 12)


def generate_after(executor: Executor, prompt: list[int]) -> list[int]:
    run = run_of(executor, prompt)
    run_step(executor, [(run, len(prompt))])
    return decode_on(executor, run)


def decode_on(executor: Executor, run: Run) -> list[int]:
    while len(run.output) < 10:
        run_step(executor, [(run, 1)])
    return run.output


def test_only_the_leader_draws_and_scores(tmp_path: Path, shared: Shared) -> None:
    """Whatever a row asks of its tokens, the other ranks compute no more than the forward."""
    directory = write(tmp_path)
    drawn = Sampling(
        max_tokens=4, temperature=0.8, seed=3, repetition_penalty=1.2, logprobs=3, top_p=0.9
    )
    prompt = list(range(30, 50))
    rows = [
        Row(prompt, 0, [0, 1], drawn, history=prompt, scored=prompt[1:], scored_top=2),
        Row(prompt[:7], 0, [2], None),
        Row([9], 0, [3], GREEDY),
    ]
    alone = shared.load(directory, 1).step_blocking(rows)
    together = shared.load(directory, 2).step_blocking(rows)
    assert together.tokens == alone.tokens
    assert [len(each) for each in together.scores] == [19, 0, 0]
    for one, other in zip(together.scores[0], alone.scores[0], strict=True):
        assert one.rank == other.rank
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_step_that_keeps_no_logits(tmp_path: Path, shared: Shared) -> None:
    for config in ("LlamaConfig", "OlmoConfig"):
        executor = shared.load(write(tmp_path / config, config), 2)
        silent = Row(list(range(20)), 0, [0, 1], None)
        assert executor.step_blocking([silent]).tokens == [None]
        assert executor.step_blocking([Row([5], 20, [0, 1], GREEDY)]).tokens != [None]
        shared.answers()


def test_a_step_says_what_a_forward_needs() -> None:
    rows = [
        Row((5, 6, 7), 4, [9, 8, 7, 6], GREEDY, output_tokens=1, scored=(6, 7), scored_top=1),
        Row([1], 15, range(4), None),
    ]
    told = decode_step(encode_step(rows, page_size=4))
    assert [(row.token_ids, row.start, row.pages) for row in told] == [
        ([5, 6, 7], 4, [9, 8]), ([1], 15, [0, 1, 2, 3]),
    ]  # fmt: skip
    assert [row.sampling is not None for row in told] == [True, False]
    assert [len(row.scored) for row in told] == [2, 0]


# What cannot be shared


def load_first_of(directory: Path, ranks: int, **settings: Any) -> None:
    """Rank 0 alone: for what is refused before the others are needed."""
    model = ModelConfig(model=str(directory), **settings)
    place = RankPlace(0, ranks, str(directory / "rendezvous"), 1.0)
    Executor.load(model, ONE_CORE, lambda text: None, place)


def test_refusals_name_both_values(tmp_path: Path) -> None:
    directory = write(tmp_path)
    with pytest.raises(ModelError, match="4 attention heads and 2 KV heads do not divide over 3"):
        load_first_of(directory, 3)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelError, match="weights quantized with fp8 cannot be split"):
        load_first_of(directory, 2)
    write_model(tmp_path / "olmo2", "Olmo2Config", {})
    with pytest.raises(ModelError, match="model_type 'olmo2' cannot be split"):
        load_first_of(tmp_path / "olmo2", 2)


# Ranks that are gone


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Shared]:
    ranks = Shared(tmp_path, others=1)
    yield ranks
    ranks.end()


def test_a_rank_that_is_silent_or_dead_ends_the_step(tmp_path: Path, pair: Shared) -> None:
    directory = write(tmp_path / "model")
    executor = pair.load(directory, 2)
    rows = [Row([5, 6, 7], 0, [0], GREEDY)]
    assert executor.step_blocking(rows).tokens != [None]
    pair.answers()
    collectives: Any = executor._collectives
    collectives._place = msgspec.structs.replace(collectives._place, seconds_max=2.0)
    collectives._backend.set_timeout(timedelta(seconds=2))
    [other] = pair.others
    os.kill(other.process.pid, signal.SIGSTOP)
    with pytest.raises(RanksLost, match="dead, or has not answered for 2 s"):
        executor.step_blocking(rows)
    with pytest.raises(RanksLost, match="rank 0: a collective"):
        executor.step_blocking(rows)
    os.kill(other.process.pid, signal.SIGCONT)
    # It finds that the leader has left, and does not wait for it.
    failed, refused = other.answers()
    assert isinstance(failed, Failed) and "RanksLost: rank 1: a collective" in failed.why
    assert isinstance(refused, Failed)
    executor = pair.load(directory, 2)
    os.kill(other.process.pid, signal.SIGKILL)
    other.process.wait()
    with pytest.raises(RanksLost, match="a collective with the other ranks"):
        executor._collectives.any(False)  # type: ignore[union-attr]


def test_a_forward_that_fails_leaves_nobody_waiting(tmp_path: Path, pair: Shared) -> None:
    executor = pair.load(write(tmp_path / "model"), 2)
    outside = Row([5], 0, [executor.pages], GREEDY)
    assert executor.tell_ranks is not None
    executor.tell_ranks(encode_step([outside], 16))
    with pytest.raises(RanksLost):
        executor._thread.submit(executor._step, [Row([5], 0, [0], GREEDY)]).result()


@pytest.mark.slow
def test_smollm2_over_three_ranks(shared: Shared) -> None:
    """Nine heads and three KV heads: two ranks could not share them."""
    try:
        directory = resolve_model(DEFAULT_MODEL, lambda text: None)
    except ModelError as error:
        pytest.skip(str(error))
    settings = {"kv_cache_memory_bytes": 2**27, "max_model_len": 512}
    expected = generate(shared.load(directory, 1, **settings))
    # Thirty layers round more often than three.
    assert_same(generate(shared.load(directory, 3, **settings)), expected, 10 * TOLERANCE)
    with pytest.raises(ModelError, match=r"9 attention heads and 3 KV heads.*are 1, 3, 9"):
        load_first_of(directory, 2)
