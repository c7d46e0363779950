"""Log probabilities: of sampled tokens and of prompts, beside transformers' own logits."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from pdrt.model.batch import Row, StepResult
from pdrt.model.executor import Executor
from pdrt.model.logprobs import BLOCK, IMPOSSIBLE, SLICE_POSITIONS, score
from pdrt.sampling import Sampling, TokenLogprobs
from tests.model.conftest import LoadExecutor, TinyModel

TOLERANCE = 1e-4
Reference = Callable[[list[int]], torch.Tensor]


def check(told: TokenLogprobs, logits: torch.Tensor, token: int, top: int) -> None:
    """Against the float32 logits (vocabulary,) of a position."""
    expected = logits.log_softmax(-1)
    assert told.logprob == pytest.approx(float(expected[token]), abs=TOLERANCE)
    assert told.rank == int((expected >= expected[token]).sum())
    values, ids = expected.topk(top)
    assert [each for each, _ in told.top] == ids.tolist()
    assert [each for _, each in told.top] == pytest.approx(values.tolist(), abs=TOLERANCE)


def test_score_over_more_positions_than_one_slice() -> None:
    count = SLICE_POSITIONS * 2 + 5
    logits = torch.randn(count, 90, generator=torch.Generator().manual_seed(1)) * 5
    tokens = [(7 * index) % 90 for index in range(count)]
    tops = [index % 4 for index in range(count)]
    told = score(logits, tokens, tops)
    for index, each in enumerate(told):
        check(each, logits[index], tokens[index], tops[index])


@pytest.mark.parametrize("top", [1, 5, 39, 40, 41])
def test_the_most_likely_of_a_vocabulary_in_blocks(top: int) -> None:
    logits = torch.randn(3, 40 * BLOCK, generator=torch.Generator().manual_seed(2))
    logits[0, 7 * BLOCK : 8 * BLOCK] += 9  # all of one block's before any other's
    logits[1, 100] = -math.inf
    logits[2, 5] = math.nan
    told = score(logits, [3, 4, 6], [top, top, top])
    for index in (0, 1):
        check(told[index], logits[index], (3, 4)[index], top)
    assert 5 not in {token for token, _ in told[2].top}


def test_ties_are_listed_by_id_and_ranked_behind_each_other() -> None:
    (told,) = score(torch.tensor([[1.0, 3.0, 0.0, 3.0]]), [3], [9])
    assert told.rank == 2
    assert [token for token, _ in told.top] == [1, 3, 0, 2]
    assert score(torch.tensor([[1.0, 3.0, 0.0, 3.0]]), [3], [0])[0].top == ()


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_what_json_cannot_say_is_a_number(value: float) -> None:
    (told,) = score(torch.tensor([[0.0, value, 1.0]]), [1], [3])
    assert told.logprob == IMPOSSIBLE
    for each in (told.logprob, *(logprob for _, logprob in told.top)):
        assert math.isfinite(each)
    (sure,) = score(torch.tensor([[-math.inf, 80.0, -math.inf]]), [1], [2])
    assert (sure.logprob, sure.rank) == (0.0, 1)
    assert sure.top[1][1] == IMPOSSIBLE


def test_bfloat16_logits_are_scored_in_float32() -> None:
    logits = (torch.randn(3, 500) * 3).to(torch.bfloat16)
    for index, told in enumerate(score(logits, [1, 2, 3], [0, 0, 0])):
        expected = logits[index].float().log_softmax(-1)
        assert told.logprob == pytest.approx(float(expected[index + 1]), abs=1e-5)


# Through the executor


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def directory(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Path:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )

    def logits(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([tokens]), use_cache=False).logits[0]

    return logits


@pytest.fixture
def executor(directory: Path, load_executor: LoadExecutor) -> Executor:
    return load_executor(directory)


def random_tokens(executor: Executor, count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, executor.identity.vocab_size) for _ in range(count)]


def prompt_row(tokens: list[int], start: int, end: int, **changes: object) -> Row:
    """A chunk of a scored prompt, in pages 0 and on."""
    is_last = end == len(tokens)
    fields = Row(
        token_ids=tokens[start:end],
        start=start,
        pages=list(range(len(tokens) // 16 + 1)),
        sampling=Sampling(max_tokens=9, temperature=0.0, logprobs=2) if is_last else None,
        scored=tokens[start + 1 : end + 1],
        scored_top=3,
    )
    return msgspec.structs.replace(fields, **changes)


@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_prompt_scores_do_not_depend_on_chunks(
    executor: Executor, reference: Reference, chunk: int
) -> None:
    tokens = random_tokens(executor, 45)
    expected = reference(tokens)
    other = Row(token_ids=tokens[:5], start=0, pages=[9], sampling=Sampling(max_tokens=1))
    scores: list[TokenLogprobs] = []
    for start in range(0, len(tokens), chunk):
        end = min(start + chunk, len(tokens))
        result = executor.step_blocking([other, prompt_row(tokens, start, end)])
        scores += result.scores[1]
        assert (result.scores[0], result.logprobs[0]) == ((), None)
    assert len(scores) == len(tokens) - 1
    for position, told in enumerate(scores):
        check(told, expected[position], tokens[position + 1], 3)
    last = result.logprobs[1]
    assert last is not None
    assert result.tokens[1] == int(expected[-1].argmax())
    check(last, expected[-1], int(expected[-1].argmax()), 2)


def test_scored_rows_leave_the_sampled_ones_as_they_are(executor: Executor) -> None:
    tokens = random_tokens(executor, 40)
    seeded = Sampling(max_tokens=9, temperature=1.0, seed=5)
    rows = [
        Row(token_ids=tokens[:3], start=0, pages=[5], sampling=seeded),
        prompt_row(tokens, 0, 40, sampling=seeded),
        Row(token_ids=tokens[3:4], start=3, pages=[6], sampling=seeded),
    ]
    plain = [msgspec.structs.replace(row, scored=(), scored_top=0) for row in rows]
    assert executor.step_blocking(rows).tokens == executor.step_blocking(plain).tokens


def test_asking_for_log_probabilities_changes_no_draw(executor: Executor) -> None:
    """And they are of the model's own distribution, whatever is done to it for the draw."""
    tokens = random_tokens(executor, 12)

    def step(logprobs: int | None) -> StepResult:
        samplings = [
            Sampling(max_tokens=9, temperature=2.0, seed=seed, top_k=40, repetition_penalty=1.8,
                     logit_bias=((9, 3.0),), logprobs=logprobs)
            for seed in range(6)
        ]  # fmt: skip
        return executor.step_blocking(
            [
                Row(token_ids=tokens, start=0, pages=[page], sampling=each, history=tokens)
                for page, each in enumerate(samplings)
            ]
        )

    silent, told = step(None), step(4)
    assert silent.tokens == told.tokens
    assert silent.logprobs == [None] * 6
    raw = step(0).logprobs
    context_free = score_of(executor, tokens)
    for token, each, bare in zip(told.tokens, told.logprobs, raw, strict=True):
        assert token is not None
        assert each is not None
        assert bare is not None
        check(each, context_free, token, 4)
        assert (bare.logprob, bare.rank, bare.top) == (each.logprob, each.rank, ())


def score_of(executor: Executor, tokens: list[int]) -> torch.Tensor:
    """The model's log probabilities after `tokens`, put together from its scores of all tokens."""
    vocabulary = executor.identity.vocab_size
    row = Row(
        token_ids=tokens,
        start=0,
        pages=[7],
        sampling=Sampling(max_tokens=1, temperature=0.0, logprobs=vocabulary),
    )
    (told,) = executor.step_blocking([row]).logprobs
    assert told is not None
    values = torch.empty(vocabulary)
    for token, logprob in told.top:
        values[token] = logprob
    return values
