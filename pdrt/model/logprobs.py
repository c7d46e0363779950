"""Log probabilities of tokens, from the logits as the model gives them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pdrt.sampling import TokenLogprobs

IMPOSSIBLE = -9999.0
"""Stands for -inf (and NaN), which JSON cannot carry; as in vLLM."""

BLOCK = 64
"""Tokens whose largest logit stands for them in a first look."""
SLICE_POSITIONS = 32
"""Positions scored at once: bounds the float32 temporaries, 32 MiB for a vocabulary of 2**18."""


def score(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """Log probability, rank and most likely tokens, position by position.

    Equally likely tokens are listed by id, and rank behind each other: a token that ties with one
    other for the first place has rank 2, and so has the other.

    Args:
        logits: (positions, vocabulary), any float dtype; not changed.
        tokens: whose log probability is wanted, one per position.
        tops: how many of the most likely tokens to list, per position; more than there are is all.
    """
    assert len(logits) == len(tokens) == len(tops), "one token and one top per position"
    scores: list[TokenLogprobs] = []
    for first in range(0, len(tokens), SLICE_POSITIONS):
        part = slice(first, first + SLICE_POSITIONS)
        scores += _score_slice(logits[part], tokens[part], tops[part])
    return scores


def _score_slice(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    logits = logits.float()
    assert 0 <= min(tokens) <= max(tokens) < logits.shape[-1], "a token that is in no vocabulary"
    ids = torch.tensor(tokens, device=logits.device)[:, None]
    chosen = logits.gather(1, ids)
    total = logits.logsumexp(dim=-1, keepdim=True)
    logprobs = _finite(chosen - total)[:, 0].tolist()
    # A comparison with NaN counts nobody; the token itself is always one.
    ranks = (logits >= chosen).count_nonzero(dim=-1).clamp(min=1).tolist()
    listed = _tops(logits, total, tops)
    return [TokenLogprobs(*each) for each in zip(logprobs, ranks, listed, strict=True)]


def _tops(
    logits: Tensor, total: Tensor, tops: Sequence[int]
) -> list[tuple[tuple[int, float], ...]]:
    """Those that want equally many go together: which of two equals comes in must not depend on
    what others ask for."""
    listed: list[tuple[tuple[int, float], ...]] = [()] * len(tops)
    for count in sorted({min(top, logits.shape[-1]) for top in tops} - {0}):
        rows = [row for row, top in enumerate(tops) if min(top, logits.shape[-1]) == count]
        values, ids = _largest(logits if len(rows) == len(tops) else logits[rows], count)
        logprobs = _finite(values - total[rows])
        for row, row_ids, row_logprobs in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
            pairs = zip(row_ids, row_logprobs, strict=True)
            listed[row] = tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
    return listed


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `topk`, NaN least. The largest lie in as many blocks, those with the largest peaks: only
    they are searched."""
    blocks = logits.shape[-1] // BLOCK
    peaks = logits[:, : blocks * BLOCK].reshape(len(logits), blocks, BLOCK).amax(dim=-1)
    if logits.shape[-1] % BLOCK or count >= blocks or bool(peaks.isnan().any()):
        # NaN would come first.
        values, ids = torch.nan_to_num(logits, -math.inf, math.inf, -math.inf).topk(count)
        return values, ids
    chosen = peaks.sort(dim=-1, descending=True, stable=True).indices[:, :count, None]
    within = torch.arange(BLOCK, device=logits.device)
    ids = (chosen * BLOCK + within).flatten(1)
    values, places = logits.gather(1, ids).topk(count)
    return values, ids.gather(1, places)


def _finite(logprobs: Tensor) -> Tensor:
    """Rounding may put the only possible token above 0."""
    return logprobs.nan_to_num(nan=IMPOSSIBLE).clamp(min=IMPOSSIBLE, max=0.0)
