"""Bias, penalties, ends held back and grammars: against transformers and plain Python."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from pdrt.model.adjust import adjust, is_adjusted
from pdrt.model.batch import Row
from pdrt.model.sampling import sample
from pdrt.sampling import Grammar, GrammarKind, Sampling

VOCABULARY = 70
EOS = (2,)
GRAMMAR = Grammar(GrammarKind.REGEX, "x")


class Permits:
    """A grammar that always permits the same tokens; keeps what it was told."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens
        self.told: list[list[int]] = []

    def advance(self, output_ids: Sequence[int]) -> None:
        self.told.append(list(output_ids))

    def fill(self, bitmask: Any, row: int) -> None:
        bits = np.zeros(bitmask.shape[1] * 32, dtype=np.bool_)
        bits[list(self.tokens)] = True
        bitmask[row] = np.packbits(bits, bitorder="little").view(np.int32)


def row(prompt: Sequence[int] = (5,), output: Sequence[int] = (), **sampling: Any) -> Row:
    """A row about to sample; `matcher` among `sampling` is the row's."""
    matcher = sampling.pop("matcher", None)
    if matcher is not None:
        sampling["grammar"] = GRAMMAR
    tokens = [*prompt, *output]
    return Row(
        token_ids=tokens[-1:],
        start=len(tokens) - 1,
        pages=[0],
        sampling=Sampling(**{"max_tokens": 99, "temperature": 0.0, **sampling}),
        output_tokens=len(output),
        history=tokens,
        matcher=matcher,
    )


def adjusted(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    own = logits.clone()
    adjust(own, rows, EOS)
    return own


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4


def test_repetition_penalty_is_that_of_transformers() -> None:
    rng = random.Random(1)
    rows = [
        row(rng.choices(range(VOCABULARY), k=30), rng.choices(range(VOCABULARY), k=n),
            repetition_penalty=penalty)
        for n, penalty in ((0, 1.3), (9, 0.7), (40, 2.0))
    ]  # fmt: skip
    logits = random_logits(3)
    ours = adjusted(logits, rows)
    for line, each in enumerate(rows):
        assert each.sampling is not None
        theirs = RepetitionPenaltyLogitsProcessor(each.sampling.repetition_penalty)
        expected = theirs(torch.tensor([each.history]), logits[line : line + 1].clone())
        torch.testing.assert_close(ours[line : line + 1], expected, atol=1e-6, rtol=0)


def naive(logits: list[float], row: Row) -> list[float]:
    """Bias, then all three penalties, token by token."""
    s = row.sampling
    assert s is not None
    output = list(row.history[len(row.history) - row.output_tokens :])
    result = []
    for token, logit in enumerate(logits):
        value = logit + dict(s.logit_bias).get(token, 0.0)
        if token in row.history:
            value *= s.repetition_penalty if value < 0 else 1 / s.repetition_penalty
        counted = s.frequency_penalty * output.count(token)
        result.append(value - counted - s.presence_penalty * (token in output))
    return result


def test_all_penalties_together_are_the_plain_ones() -> None:
    rng = random.Random(2)
    rows = []
    for count in (0, 1, 25, 60):
        bias = tuple((token, rng.uniform(-100, 100)) for token in rng.sample(range(VOCABULARY), 5))
        rows.append(
            row(
                rng.choices(range(VOCABULARY), k=12),
                rng.choices(range(9), k=count),
                presence_penalty=rng.uniform(-2, 2),
                frequency_penalty=rng.uniform(-2, 2),
                repetition_penalty=rng.uniform(0.5, 2),
                logit_bias=bias,
            )
        )
    logits = random_logits(4)
    expected = [naive(*each) for each in zip(logits.tolist(), rows, strict=True)]
    torch.testing.assert_close(adjusted(logits, rows), torch.tensor(expected), atol=1e-4, rtol=1e-5)


def test_presence_and_frequency_do_not_see_the_prompt() -> None:
    logits = random_logits(1)
    prompt_only = row([7, 7, 8], presence_penalty=2.0, frequency_penalty=2.0)
    assert torch.equal(adjusted(logits, [prompt_only]), logits)
    once_more = adjusted(logits, [row([7, 7, 8], [7], presence_penalty=2.0, frequency_penalty=1.0)])
    assert torch.nonzero(once_more != logits).tolist() == [[0, 7]]
    assert float(once_more[0, 7]) == pytest.approx(float(logits[0, 7]) - 3.0, abs=1e-5)


def test_greedy_is_penalized_too() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 10], logits[0, 11] = 3.0, 2.0
    assert sample(logits, [row([10])], EOS) == [10]
    assert sample(logits, [row([10], repetition_penalty=2.0)], EOS) == [11]
    assert sample(logits, [row([10], logit_bias=((40, 100.0),))], EOS) == [40]
    assert sample(logits, [row([5], [10, 10], frequency_penalty=1.0)], EOS) == [11]


def test_a_row_is_adjusted_only_where_it_asks() -> None:
    assert not is_adjusted(row([1], [2]))
    assert not is_adjusted(row([1], [2], min_tokens=1, temperature=1.0, top_p=0.5, logprobs=3))
    assert is_adjusted(row([1], [2], min_tokens=2))
    assert is_adjusted(row(logit_bias=((1, 1.0),)))
    for penalty in ("presence_penalty", "frequency_penalty"):
        assert is_adjusted(row(**{penalty: -0.1}))
    assert is_adjusted(row(repetition_penalty=1.1))
    assert is_adjusted(row(matcher=Permits(1)))


def mixed_rows() -> list[Row]:
    return [
        row([1, 3], [4, 4], repetition_penalty=1.5, temperature=1.0, seed=3),
        row([1, 3], [4, 4], temperature=1.0, seed=4),
        row([9], [4], frequency_penalty=1.5, min_tokens=5),
        row([9], [4], temperature=0.7, top_k=20, seed=5, matcher=Permits(*range(30, 60))),
        row([9], [4]),
        row([9, 9, 9], [4, 5], logit_bias=((6, 9.0), (7, -9.0)), temperature=2.0, seed=6),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draw_does_not_depend_on_what_others_ask_for(dtype: torch.dtype) -> None:
    logits = random_logits(6, seed=8).to(dtype)
    kept = logits.clone()
    rows = mixed_rows()
    together = sample(logits, rows, EOS)
    assert together == [sample(logits[i : i + 1], [rows[i]], EOS)[0] for i in range(6)]
    assert sample(logits.flip(0), rows[::-1], EOS)[::-1] == together
    assert torch.equal(logits, kept), "the caller's logits are what log probabilities are of"


def test_a_grammar_masks_all_else() -> None:
    permits = Permits(3, 69)
    own = adjusted(random_logits(1), [row([5], [8, 9], matcher=permits)])
    assert torch.isfinite(own[0]).nonzero()[:, 0].tolist() == [3, 69]
    assert permits.told == [[8, 9]], "the prompt is no business of a grammar"


def test_where_the_grammar_may_end_any_end_may_come() -> None:
    own = adjusted(random_logits(1), [row(matcher=Permits(3, 2), stop_token_ids=(50, 999))])
    assert torch.isfinite(own[0]).nonzero()[:, 0].tolist() == [2, 3, 50]
    own = adjusted(random_logits(1), [row(matcher=Permits(3), stop_token_ids=(50,))])
    assert torch.isfinite(own[0]).nonzero()[:, 0].tolist() == [3]


def test_min_tokens_against_a_grammar() -> None:
    held = {"min_tokens": 4, "stop_token_ids": (50,)}
    own = adjusted(random_logits(1), [row(matcher=Permits(2, 3), **held)])
    assert torch.isfinite(own[0]).nonzero()[:, 0].tolist() == [3]
    only_the_end = adjusted(random_logits(1), [row(matcher=Permits(2), **held)])
    assert torch.isfinite(only_the_end[0]).nonzero()[:, 0].tolist() == [2, 50]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, -3e38])
def test_a_grammar_holds_whatever_the_logits_are(value: float, temperature: float) -> None:
    logits = torch.full((1, VOCABULARY), value)
    drawn = row([7, 8], [8], matcher=Permits(8, 9), temperature=temperature,
                repetition_penalty=3.0, logit_bias=((8, -100.0),))  # fmt: skip
    assert sample(logits, [drawn], EOS)[0] in (8, 9)


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_token_that_is_in_no_vocabulary_is_our_own_bug(token: int) -> None:
    with pytest.raises(AssertionError, match="no vocabulary"):
        adjusted(random_logits(1), [row([5], [token], presence_penalty=1.0)])
    with pytest.raises(AssertionError, match="no vocabulary"):
        adjusted(random_logits(1), [row(logit_bias=((token, 1.0),))])
