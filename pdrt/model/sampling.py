"""Drawing the next token of every row of a batch.

The draw of a row depends on its logits, its seed and the token's absolute position, on nothing
else: not on the rest of the batch, on a generator's state, or on the worker. So a request that
moves to another worker goes on with the same draws.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pdrt.model.adjust import adjust, is_adjusted, sampling_of
from pdrt.model.batch import Row
from pdrt.sampling import Sampling

CANDIDATES = 256
"""Largest probabilities looked at first, for all rows together."""
MORE_CANDIDATES = 4096
"""Looked at for a row whose top-p reaches further; only one that reaches further still sorts."""

BLOCK = 256
"""Tokens whose probabilities are summed at once when a draw is looked up."""

_MASK64 = (1 << 64) - 1


def sample(logits: Tensor, rows: Sequence[Row], eos_ids: Collection[int]) -> list[int]:
    """One token per row.

    Bias, penalties, `min_tokens` and grammar first (`adjust`). Then temperature 0 takes the largest
    logit. Otherwise: temperature, then top-k, then top-p over what is left, then min-p relative to
    the most likely token. Tokens that tie with the last one a filter keeps are kept too.

    Args:
        logits: (rows, vocabulary), any float dtype; not changed.
        rows: all of them sample.
        eos_ids: masked, with the row's stop tokens, until `min_tokens` output tokens exist.
    """
    tokens = logits.argmax(dim=-1)
    # Copies, worked on in place: fresh memory costs more than the arithmetic. Others are left
    # alone, so that nobody's draw depends on what another row asks for.
    adjusted = [index for index, row in enumerate(rows) if is_adjusted(row)]
    changed: dict[int, Tensor] = {}
    if adjusted:
        own = logits[adjusted].float()
        adjust(own, [rows[index] for index in adjusted], eos_ids)
        tokens[adjusted] = own.argmax(dim=-1)
        changed = dict(zip(adjusted, own, strict=True))
    drawn = [index for index, row in enumerate(rows) if sampling_of(row).temperature > 0]
    if drawn:
        random = logits[drawn].float()
        for place, index in enumerate(drawn):
            if index in changed:
                random[place] = changed[index]
        samplings = [sampling_of(rows[index]) for index in drawn]
        draws = [uniform(sampling_of(rows[index]).seed, rows[index].end) for index in drawn]
        tokens[drawn] = _draw(random, samplings, draws)
    return [int(token) for token in tokens.tolist()]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments only: splitmix64, twice."""
    bits = _splitmix64((_splitmix64(seed & _MASK64) + position) & _MASK64)
    return (bits >> 11) * 2.0**-53


def _splitmix64(state: int) -> int:
    """The finalizer of Steele, Lea and Flood, "Fast splittable pseudorandom number generators"."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _draw(logits: Tensor, samplings: Sequence[Sampling], draws: Sequence[float]) -> Tensor:
    """Inverse CDF, in order of token ids, over the probabilities that the filters keep.

    `logits` (float32) are overwritten.
    """
    likelihood = _likelihood(logits, samplings)
    if any(s.top_k > 0 or s.top_p < 1 for s in samplings):
        _filter_top(likelihood, samplings)
    if any(s.min_p > 0 for s in samplings):
        # The most likely token has likelihood 1.
        floor = torch.tensor([min(s.min_p, 1.0) for s in samplings], device=logits.device)
        likelihood[likelihood < floor[:, None].to(likelihood.dtype)] = 0
    return _invert(likelihood, torch.tensor(draws, dtype=torch.float64, device=logits.device))


def _invert(likelihood: Tensor, draws: Tensor) -> Tensor:
    """Per row, the token at which the running sum exceeds the draw's share of the total.

    In two levels, blocks and then the tokens of one block: a running sum over the vocabulary is
    slow. In double precision: in single, the rounding of 50,000 sums shifts probabilities.
    """
    rows, vocabulary = likelihood.shape
    blocks = F.pad(likelihood, (0, -vocabulary % BLOCK)).view(rows, -1, BLOCK)
    block_ends = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = _below(draws[:, None] * block_ends[:, -1:], block_ends[:, -1:])
    block = torch.searchsorted(block_ends, target, right=True)
    ends_before = F.pad(block_ends, (1, 0)).gather(1, block)
    within = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(dim=-1)
    rest = _below(target - ends_before, within[:, -1:])
    return (block * BLOCK + torch.searchsorted(within, rest, right=True))[:, 0]


def _below(target: Tensor, total: Tensor) -> Tensor:
    """`target`, kept under `total`: rounded up to it, it would point behind the last token."""
    return torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))


def _likelihood(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Probabilities up to a factor: the most likely token has 1. Finite for any temperature.

    Works in place: `logits` is what is returned.
    """
    largest = torch.finfo(logits.dtype).max
    # NaN counts as impossible, infinity as the largest number; -inf (masked) stays as it is.
    logits.nan_to_num_(nan=float("-inf"), posinf=largest, neginf=float("-inf"))
    peak = logits.amax(dim=-1, keepdim=True).clamp_(min=-largest)
    temperature = torch.tensor(
        [s.temperature for s in samplings], dtype=torch.float64, device=logits.device
    )
    scale = temperature.clamp(min=1e-30, max=1e30).to(logits.dtype)[:, None]
    likelihood = logits.sub_(peak).div_(scale).exp_()
    # A row without a single possible token (all NaN): any token is as good as another.
    likelihood[likelihood.sum(dim=-1) == 0] = 1
    return likelihood


def _filter_top(likelihood: Tensor, samplings: Sequence[Sampling]) -> None:
    """Zero what top-k and top-p leave out, in place."""
    vocabulary = likelihood.shape[-1]
    top_ks = [s.top_k if 0 < s.top_k < vocabulary else vocabulary for s in samplings]
    limited = [k for k in top_ks if k < vocabulary]
    count = min(vocabulary, max([CANDIDATES, *limited]))
    values = likelihood.topk(count, dim=-1).values
    for row, (sampling, top_k) in enumerate(zip(samplings, top_ks, strict=True)):
        if top_k == vocabulary and sampling.top_p >= 1:
            continue
        mass = float(likelihood[row].double().sum()) if top_k == vocabulary else None
        threshold = _threshold(values[row], top_k, sampling.top_p, mass)
        if threshold is None:
            more = likelihood[row].topk(min(vocabulary, MORE_CANDIDATES)).values
            threshold = _threshold(more, top_k, sampling.top_p, mass)
        if threshold is None:
            ordered = likelihood[row].sort(descending=True).values
            threshold = _threshold(ordered, top_k, sampling.top_p, mass)
        assert threshold is not None, "all probabilities reach any top-p"
        likelihood[row][likelihood[row] < threshold] = 0


def _threshold(ordered: Tensor, top_k: int, top_p: float, mass: float | None) -> float | None:
    """The smallest likelihood that top-k and top-p keep, or None if `ordered` ends before it.

    Args:
        ordered: the largest likelihoods, descending.
        mass: sum of all likelihoods; None: of the first `top_k`.
    """
    kept = ordered[:top_k]
    if top_p >= 1:
        return float(kept[-1])
    cumulative = kept.double().cumsum(dim=-1)
    target = top_p * (float(cumulative[-1]) if mass is None else mass)
    # The first token is always kept; then every one whose predecessors do not reach the target.
    index = int((cumulative < target).sum())
    if index < len(kept):
        return float(kept[index])
    return float(kept[-1]) if mass is None or len(kept) >= top_k else None
