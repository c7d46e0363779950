"""What a request asks to be done to its logits before a token is drawn: bias, penalties, ends held
back, grammar; in this order, as vLLM has it.

All of it is a function of the request's parameters and of its tokens so far.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdrt.model.batch import Row
from pdrt.sampling import Sampling

Ids = np.ndarray[Any, np.dtype[np.int64]]

BITS = 32
"""Tokens in one word of a grammar's bitmask."""


def is_adjusted(row: Row) -> bool:
    """Whether `adjust` has anything to do for a row that samples."""
    sampling = sampling_of(row)
    return (
        row.output_tokens < sampling.min_tokens
        or bool(sampling.logit_bias)
        or sampling.needs_history
    )


def sampling_of(row: Row) -> Sampling:
    assert row.sampling is not None, "only rows that sample are sampled"
    return row.sampling


def advance_matchers(rows: Sequence[Row]) -> None:
    """Tell grammars what there is of their outputs: before the forward, so that what may come next
    is found out beside it."""
    for row in rows:
        if row.matcher is not None and row.sampling is not None:
            row.matcher.advance(_output_ids(row))


def adjust(logits: Tensor, rows: Sequence[Row], eos_ids: Collection[int]) -> None:
    """Change the logits as the rows' parameters say, in place. Some token always stays possible.

    Args:
        logits: (rows, vocabulary), float32.
        rows: all of them sample.
        eos_ids: the model's ends; masked, with the row's stop tokens, until it has `min_tokens`.
    """
    assert logits.dtype == torch.float32, logits.dtype
    _add_bias(logits, rows)
    _penalize(logits, rows)
    # NaN counts as the least likely and infinity as a large number, so that what is masked below
    # stays the only thing that is impossible.
    largest = torch.finfo(logits.dtype).max
    logits.nan_to_num_(nan=-largest, posinf=largest, neginf=-largest)
    allowed = _allowed(logits.shape[-1], rows, eos_ids)
    for index, tokens in allowed.items():
        logits[index].masked_fill_(torch.from_numpy(~tokens).to(logits.device), float("-inf"))


# Bias and penalties


def _add_bias(logits: Tensor, rows: Sequence[Row]) -> None:
    biases = [sampling_of(row).logit_bias for row in rows]
    ids = [np.array([token for token, _ in bias], dtype=np.int64) for bias in biases]
    values = np.array([value for bias in biases for _, value in bias], dtype=np.float32)
    if len(values):
        where = _where(logits, ids)
        logits[where] += torch.from_numpy(values).to(logits.device)


def _penalize(logits: Tensor, rows: Sequence[Row]) -> None:
    """Repetition first, then presence and frequency, as in vLLM."""
    samplings = [sampling_of(row) for row in rows]
    seen = [
        np.unique(_history(row)) if s.repetition_penalty != 1 else _none()
        for row, s in zip(rows, samplings, strict=True)
    ]
    if any(len(ids) for ids in seen):
        where = _where(logits, seen)
        penalty = _spread(logits, [s.repetition_penalty for s in samplings], seen)
        values = logits[where]
        logits[where] = torch.where(values > 0, values / penalty, values * penalty)
    counted = [
        np.unique(_output(row), return_counts=True)
        if s.presence_penalty != 0 or s.frequency_penalty != 0
        else (_none(), _none())
        for row, s in zip(rows, samplings, strict=True)
    ]
    ids = [tokens for tokens, _ in counted]
    if any(len(tokens) for tokens in ids):
        times = torch.from_numpy(np.concatenate([count for _, count in counted])).to(logits.device)
        frequency = _spread(logits, [s.frequency_penalty for s in samplings], ids)
        presence = _spread(logits, [s.presence_penalty for s in samplings], ids)
        logits[_where(logits, ids)] -= frequency * times + presence


def _history(row: Row) -> Ids:
    """All tokens so far; without a copy where the history is an array of 64-bit integers."""
    return np.asarray(row.history, dtype=np.int64)


def _output_ids(row: Row) -> Sequence[int]:
    return row.history[row.end - row.output_tokens :]


def _output(row: Row) -> Ids:
    return np.asarray(_output_ids(row), dtype=np.int64)


def _none() -> Ids:
    return np.empty(0, dtype=np.int64)


def _where(logits: Tensor, ids: Sequence[Ids]) -> tuple[Tensor, Tensor]:
    """Index of the given tokens of each row; no token twice in a row."""
    columns = np.concatenate(ids)
    assert 0 <= columns.min() <= columns.max() < logits.shape[-1], "a token in no vocabulary"
    lines = np.repeat(np.arange(len(ids)), [len(tokens) for tokens in ids])
    return torch.from_numpy(lines).to(logits.device), torch.from_numpy(columns).to(logits.device)


def _spread(logits: Tensor, values: Iterable[float], ids: Sequence[Ids]) -> Tensor:
    """Each row's value, once per token of the row."""
    spread = np.repeat(np.array(list(values), dtype=np.float32), [len(tokens) for tokens in ids])
    return torch.from_numpy(spread).to(logits.device)


# Ends and grammar


def _allowed(
    vocabulary: int, rows: Sequence[Row], eos_ids: Collection[int]
) -> dict[int, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Per row that has any limit, (vocabulary,): the tokens that may come next."""
    allowed = {}
    for index, row in enumerate(rows):
        sampling = sampling_of(row)
        ends = [t for t in {*eos_ids, *sampling.stop_token_ids} if 0 <= t < vocabulary]
        is_held = row.output_tokens < sampling.min_tokens
        if row.matcher is None and not is_held:
            continue
        tokens = np.ones(vocabulary, dtype=np.bool_)
        if row.matcher is not None:
            tokens = _permitted(row, vocabulary)
            if tokens[[t for t in eos_ids if 0 <= t < vocabulary]].any():
                # The output may end here, so it may end with any token that ends it.
                tokens[ends] = True
        if is_held:
            others = tokens.copy()
            others[ends] = False
            # A grammar that permits nothing but the end has its way, and so has a vocabulary.
            tokens = others if others.any() else tokens
        allowed[index] = tokens
    return allowed


def _permitted(row: Row, vocabulary: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """What the row's grammar permits after its output so far."""
    assert row.matcher is not None
    row.matcher.advance(_output_ids(row))
    bitmask = np.zeros((1, -(-vocabulary // BITS)), dtype=np.int32)
    row.matcher.fill(bitmask, 0)
    # Least significant bit first; words are little-endian on every machine this runs on.
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little", count=vocabulary)
    permitted = bits.view(np.bool_)
    assert permitted.any(), "a grammar permits no token at all"
    return permitted
