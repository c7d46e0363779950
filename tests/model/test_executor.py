"""The executor: one step at a time, on its own thread, and still usable after a failure."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from typing import Any

import pytest
import torch

from pdrt.config import DeviceConfig, ModelConfig
from pdrt.errors import ConfigError, ModelError
from pdrt.model.batch import Row
from pdrt.model.executor import Executor
from pdrt.model.fused import FusedDecoder
from pdrt.model.sdpa import GROUP_OVERHEAD_TOKENS, group_by_length
from pdrt.sampling import Sampling
from tests.model.conftest import FORWARDS, LoadExecutor, TinyModel, UseForward
from tests.model.tiny import EOS_ID

GREEDY = Sampling(max_tokens=8, temperature=0.0)


@pytest.fixture
def executor(tiny_model: TinyModel, load_executor: LoadExecutor) -> Executor:
    return load_executor(tiny_model("llama"))


def row(length: int, pages: list[int], **changes: Any) -> Row:
    fields = {"token_ids": [7] * length, "start": 0, "pages": pages, "sampling": GREEDY}
    return Row(**{**fields, **changes})


async def test_step_gives_tokens_in_the_order_of_the_rows(executor: Executor) -> None:
    a, b, c = row(20, [3, 9]), row(1, [5], token_ids=[11]), row(5, [2], token_ids=[9] * 5)
    alone = [(await executor.step([r])).tokens[0] for r in (a, b, c)]
    silent = row(4, [1], sampling=None)
    result = await executor.step([a, silent, b, c])
    assert result.tokens == [alone[0], None, alone[1], alone[2]]
    assert result.seconds > 0


def test_a_step_that_samples_nothing(executor: Executor) -> None:
    assert executor.step_blocking([row(20, [0, 1], sampling=None)]).tokens == [None]


async def test_one_step_at_a_time(executor: Executor) -> None:
    running = executor.step([row(20, [0, 1])])
    with pytest.raises(AssertionError, match="one step at a time"):
        executor.step([row(20, [2, 3])])
    await running
    await executor.step([row(20, [2, 3])])


async def test_a_cancelled_caller_does_not_stop_the_step(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, release = threading.Event(), threading.Event()
    forward = executor.forward

    def slow(context: Any) -> torch.Tensor:
        started.set()
        release.wait(10)
        return forward(context)

    monkeypatch.setattr(executor, "forward", slow)
    running = executor.step([row(4, [0])])
    await asyncio.to_thread(started.wait, 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(AssertionError, match="one step at a time"):
        await executor.step([row(4, [1])])
    release.set()


async def test_a_failed_forward_leaves_the_executor_usable(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(executor, "forward", lambda context: torch.empty(2**60))
        with pytest.raises(RuntimeError):
            await executor.step([row(4, [0])])
    assert (await executor.step([row(4, [0])])).tokens[0] is not None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least one row"),
        ([row(0, [0])], "at least one token"),
        ([row(17, [0])], "1 pages for 17 tokens"),
        ([row(4, [10**6])], "outside of the pool"),
        ([row(20, [4, 4])], "twice in one row"),
        ([row(4, [4]), row(4, [4])], "two rows write"),
        ([row(1, [0] * 64, start=512)], "exceed the model"),
    ],
)
def test_broken_rows_are_refused(executor: Executor, rows: list[Row], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        executor.step_blocking(rows)


def test_a_shared_prefix_may_be_read_by_many(executor: Executor) -> None:
    tokens = list(range(10, 30))
    expected = executor.step_blocking([row(20, [0, 1], token_ids=tokens)]).tokens
    # Page 0 is full and only read; each row writes into a page of its own.
    tails = [row(4, [0, page], token_ids=tokens[16:], start=16) for page in (2, 3)]
    assert executor.step_blocking(tails).tokens == expected * 2


@pytest.mark.parametrize("forward", FORWARDS)
def test_what_a_page_held_before_does_not_matter(
    tiny_model: TinyModel, load_executor: LoadExecutor, use_forward: UseForward, forward: str
) -> None:
    """Not even the NaN of a sequence that overflowed: masked slots are multiplied by 0."""
    use_forward(forward)
    executor = load_executor(tiny_model("llama"))
    prompt = row(18, [0, 1])
    step = row(1, [0, 1], start=18)
    other = row(1, [2, 3], start=17)
    expected = [executor.step_blocking([r]).tokens for r in (prompt, step)]
    executor.pool.tensor[1].fill_(1e30)
    assert [executor.step_blocking([r]).tokens for r in (prompt, step)] == expected
    weight = embedding(executor)
    with torch.inference_mode():
        kept = weight[7].clone()
        weight[7] = math.nan
        executor.step_blocking([prompt])
        weight[7] = kept
    assert torch.isfinite(executor.pool.tensor).all()
    assert [executor.step_blocking([r]).tokens for r in (prompt, step)] == expected
    executor.step_blocking([other, step])


def embedding(executor: Executor) -> torch.Tensor:
    """The embedding's weight, (vocabulary, hidden), of a model that does not tie it to its head."""
    model: Any = executor._model
    if isinstance(model, FusedDecoder):
        assert model._embedding is not None
        return model._embedding
    weight: torch.Tensor = model._module.get_input_embeddings().weight
    return weight


def test_min_tokens_holds_the_end_back(
    tiny_model: TinyModel, load_executor: LoadExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = load_executor(tiny_model("llama"))
    forward = executor.forward
    monkeypatch.setattr(executor, "forward", lambda context: forward(context) * 0)
    eos_first = row(4, [0])
    assert executor.step_blocking([eos_first]).tokens == [0]
    held = Sampling(max_tokens=8, min_tokens=1, temperature=0.0, stop_token_ids=(0, 1))
    assert executor.step_blocking([row(4, [0], sampling=held)]).tokens == [EOS_ID + 1]
    ended = row(4, [0], sampling=held, output_tokens=1)
    assert executor.step_blocking([ended]).tokens == [0]


def test_the_compute_thread_is_pinned_and_no_other(tiny_model: TinyModel) -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    executor = Executor.load(
        ModelConfig(model=str(tiny_model("llama")), kv_cache_memory_bytes=2**23),
        DeviceConfig(device="cpu", cpus=str(core)),
        lambda text: None,
    )
    try:
        assert executor._thread.submit(os.sched_getaffinity, 0).result() == {core}
        assert executor._thread.submit(torch.get_num_threads).result() == 1
        assert os.sched_getaffinity(0) == before
    finally:
        executor.close()


def test_dummy_weights_are_the_same_everywhere(
    tiny_model: TinyModel, load_executor: LoadExecutor
) -> None:
    first, second = (load_executor(tiny_model("llama"), load_format="dummy") for _ in range(2))
    assert first.identity == second.identity
    assert first.identity != load_executor(tiny_model("llama")).identity
    rows = [row(20, [0, 1])]
    assert first.step_blocking(rows).tokens == second.step_blocking(rows).tokens


def test_load_errors_say_what_to_do(tiny_model: TinyModel, load_executor: LoadExecutor) -> None:
    directory = tiny_model("llama")
    with pytest.raises(ConfigError, match="--max-model-len"):
        load_executor(directory, max_model_len=4096)
    with pytest.raises(ConfigError, match="smaller --max-model-len"):
        load_executor(directory, kv_cache_memory_bytes=10_000)
    with pytest.raises(ModelError, match="no model"):
        load_executor("does-not-exist")


def test_groups_of_similar_length() -> None:
    assert group_by_length([100]) == [[0]]
    assert group_by_length([100, 120, 90]) == [[1, 0, 2]]
    long = 40 * GROUP_OVERHEAD_TOKENS
    assert group_by_length([100, long, 90, long]) == [[1, 3], [0, 2]]
