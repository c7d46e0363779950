"""Drawing the next token of every row of a batch.

The draw of a row depends on its logits, its seed and the token's absolute position, on nothing
else: not on the rest of the batch, on a generator's state, or on the worker. So a request that
moves to another worker goes on with the same draws.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pdrt.model.adjust import adjust, is_adjusted, sampling_of
from pdrt.model.batch import Row
from pdrt.sampling import Sampling

BLOCK = 256
"""Tokens whose probabilities are summed at once: a running sum over the vocabulary is slow."""
SINGLES = 16
"""Of these, as many are summed in single precision first, with a relative error below 1e-6."""
TOP_BLOCK = 64
"""Tokens whose largest one stands for them in a first look, which is faster than a search."""
LOG_LIKELIHOOD_MIN = -80.0
"""Below it no draw gets, in double precision. `exp` is several times slower where its results
become denormal, as most do at a low temperature."""

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
    if all(sampling_of(row).temperature <= 0 and not is_adjusted(row) for row in rows):
        return [int(token) for token in _largest(logits).tolist()]
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    # Each kind apart, in copies that are worked on in place: fresh memory costs more than the
    # arithmetic, and nobody's draw depends on what another row asks for.
    for is_changed, is_drawn in itertools.product((False, True), repeat=2):
        places = [
            place
            for place, row in enumerate(rows)
            if is_adjusted(row) == is_changed and (sampling_of(row).temperature > 0) == is_drawn
        ]
        if places:
            chosen = [rows[place] for place in places]
            part = logits if len(places) == len(rows) else logits[places]
            tokens[places] = _sample_alike(part, chosen, eos_ids, is_changed, is_drawn)
    return [int(token) for token in tokens.tolist()]


def _sample_alike(
    logits: Tensor, rows: Sequence[Row], eos_ids: Collection[int], is_changed: bool, is_drawn: bool
) -> Tensor:
    """For rows that are all, or none of them, adjusted and drawn."""
    if is_changed or is_drawn:
        logits = logits.to(torch.float32, copy=True)
    if is_changed:
        adjust(logits, rows, eos_ids)
    if not is_drawn:
        return _largest(logits)
    samplings = [sampling_of(row) for row in rows]
    return _draw(logits, samplings, [uniform(sampling_of(r).seed, r.end) for r in rows])


def _largest(logits: Tensor) -> Tensor:
    """As `argmax` over the vocabulary, the first of equals: four times as fast on a CPU."""
    if logits.shape[-1] % TOP_BLOCK:
        return logits.argmax(dim=-1)
    blocks = logits.view(len(logits), -1, TOP_BLOCK)
    block = blocks.amax(dim=-1).argmax(dim=-1)
    within = blocks[torch.arange(len(logits), device=logits.device), block].argmax(dim=-1)
    return block * TOP_BLOCK + within


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
    wanted = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None]
    is_filtered = [s.top_k > 0 or s.top_p < 1 or s.min_p > 0 for s in samplings]
    if not any(is_filtered):
        return _invert(likelihood, wanted)
    if all(is_filtered):
        return _draw_filtered(likelihood, samplings, wanted)
    tokens = torch.empty(len(samplings), dtype=torch.int64, device=logits.device)
    some = [place for place, is_so in enumerate(is_filtered) if is_so]
    rest = [place for place, is_so in enumerate(is_filtered) if not is_so]
    tokens[rest] = _invert(likelihood[rest], wanted[rest])
    chosen = [samplings[place] for place in some]
    tokens[some] = _draw_filtered(likelihood[some], chosen, wanted[some])
    return tokens


def _likelihood(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Probabilities up to a factor: the most likely token has 1. Finite for any temperature.

    Works in place: `logits` is what is returned.
    """
    largest = torch.finfo(logits.dtype).max
    peak = logits.amax(dim=-1, keepdim=True)
    if not bool(peak.isfinite().all()):
        # NaN counts as impossible, infinity as the largest number; -inf (masked) stays as it is.
        logits.nan_to_num_(nan=float("-inf"), posinf=largest, neginf=float("-inf"))
        peak = logits.amax(dim=-1, keepdim=True)
    is_hopeless = peak[:, 0] == float("-inf")
    temperature = torch.tensor(
        [s.temperature for s in samplings], dtype=torch.float64, device=logits.device
    )
    scale = temperature.clamp(min=1e-30, max=1e30).to(logits.dtype)[:, None]
    logits.sub_(peak.clamp_(min=-largest)).div_(scale).clamp_(min=LOG_LIKELIHOOD_MIN).exp_()
    likelihood = torch.threshold_(logits, 1.01 * math.exp(LOG_LIKELIHOOD_MIN), 0.0)
    # A row without a single possible token (all NaN): any token is as good as another.
    likelihood[is_hopeless] = 1
    return likelihood


def _invert(likelihood: Tensor, draws: Tensor) -> Tensor:
    """Per row, the token at which the running sum exceeds the draw's share of the total.

    In two levels, blocks and then the tokens of one block. In double precision: in single, the
    rounding of 50,000 sums shifts probabilities.
    """
    blocks = _blocks(likelihood)
    block_ends = _block_ends(blocks)
    target = _below(draws * block_ends[:, -1:], block_ends[:, -1:])
    block = torch.searchsorted(block_ends, target, right=True)
    ends_before = F.pad(block_ends, (1, 0)).gather(1, block)
    within = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(dim=-1)
    rest = _below(target - ends_before, within[:, -1:])
    return (block * BLOCK + torch.searchsorted(within, rest, right=True))[:, 0]


def _blocks(likelihood: Tensor) -> Tensor:
    """(rows, blocks, `BLOCK`); a copy only where the vocabulary does not divide."""
    missing = -likelihood.shape[-1] % BLOCK
    whole = F.pad(likelihood, (0, missing)) if missing else likelihood
    return whole.view(len(whole), -1, BLOCK)


def _block_ends(blocks: Tensor) -> Tensor:
    """(rows, blocks), float64: the sum of all likelihoods up to each block's end."""
    singles = blocks.view(*blocks.shape[:2], -1, SINGLES).sum(dim=-1)
    return singles.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)


def _below(target: Tensor, total: Tensor) -> Tensor:
    """`target`, kept under `total`: rounded up to it, it would point behind the last token."""
    return torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))


# Top-k, top-p, min-p


class _Filters:
    """Of each row, as tensors (rows, 1)."""

    def __init__(
        self, samplings: Sequence[Sampling], vocabulary: int, device: torch.device
    ) -> None:
        top_ks = [s.top_k if 0 < s.top_k < vocabulary else vocabulary for s in samplings]
        self.top_k = torch.tensor(top_ks, device=device)[:, None]
        self.top_p = torch.tensor(
            [min(s.top_p, 1.0) for s in samplings], dtype=torch.float64, device=device
        )[:, None]
        self.min_p = torch.tensor([min(s.min_p, 1.0) for s in samplings], device=device)[:, None]
        self.is_top_k = self.top_k < vocabulary
        self.is_top_p = self.top_p < 1


def _draw_filtered(likelihood: Tensor, samplings: Sequence[Sampling], draws: Tensor) -> Tensor:
    """As `_invert`, over what the filters keep."""
    values, ids = _keep(likelihood, samplings)
    ends = values.double().cumsum(dim=-1)
    target = _below(draws * ends[:, -1:], ends[:, -1:])
    return ids.gather(1, torch.searchsorted(ends, target, right=True))[:, 0]


def _keep(likelihood: Tensor, samplings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
    """What top-k, top-p and min-p keep: likelihoods and token ids, (rows, any), ids ascending;
    likelihood 0 for what is dropped, and where a row has fewer.

    The vocabulary is not sorted: what cannot be kept is dropped by a bound first, which leaves some
    tens of tokens of a peaked distribution and some thousands of a flat one.
    """
    missing = -likelihood.shape[-1] % TOP_BLOCK
    whole = F.pad(likelihood, (0, missing)) if missing else likelihood
    blocks = whole.view(len(whole), -1, TOP_BLOCK)
    peaks = blocks.amax(dim=-1)
    filters = _Filters(samplings, likelihood.shape[-1], likelihood.device)
    mass = _block_ends(_blocks(likelihood))[:, -1:]
    bound = _bound(peaks, likelihood.shape[-1], filters, mass)
    row_of, block_of = (peaks >= bound).nonzero(as_tuple=True)
    found = blocks[row_of, block_of]
    place, within = (found >= bound[row_of]).nonzero(as_tuple=True)
    rows, columns = row_of[place], block_of[place] * TOP_BLOCK + within
    counts = torch.bincount(rows, minlength=len(whole))
    order = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    shape = len(whole), int(counts.max())
    values, ids = likelihood.new_zeros(shape), columns.new_zeros(shape)
    values[rows, order], ids[rows, order] = found[place, within], columns
    values[values < _thresholds(values, filters, mass)] = 0
    return values, ids


def _bound(peaks: Tensor, vocabulary: int, filters: _Filters, mass: Tensor) -> Tensor:
    """(rows, 1), above 0: no token below it is kept by the row's first filter.

    Top-k: as many blocks of the vocabulary have a token that reaches the k-th largest of the
    blocks' peaks. Top-p: where the largest peaks alone come to its share, nothing below them is
    kept; and all tokens below an equal share of what it leaves out come to less than that, and so
    lie outside: half of it, as sums are rounded.
    """
    # One more, that every token reaches: where there are too few peaks.
    ordered = F.pad(peaks.sort(dim=-1, descending=True).values, (0, 1))
    last = peaks.shape[-1]
    kth = ordered.gather(1, (filters.top_k - 1).clamp(max=last))
    enough = (ordered.double().cumsum(dim=-1) < filters.top_p * mass).sum(dim=-1, keepdim=True)
    reached = ordered.gather(1, enough.clamp(max=last))
    share = (0.5 * (1 - filters.top_p) * mass / vocabulary).to(peaks.dtype)
    bound = torch.where(filters.is_top_p, torch.maximum(reached, share), filters.min_p)
    bound = torch.where(filters.is_top_k, kth, bound)
    return bound.clamp_(min=torch.finfo(peaks.dtype).tiny)


def _thresholds(candidates: Tensor, filters: _Filters, mass: Tensor) -> Tensor:
    """(rows, 1): the smallest likelihood that all filters keep.

    Args:
        candidates: (rows, any), in any order: all that may be kept, and zeros.
        mass: (rows, 1), of all likelihoods.
    """
    ordered = candidates.sort(dim=-1, descending=True).values
    cumulative = ordered.double().cumsum(dim=-1)
    last = filters.top_k.clamp(max=ordered.shape[-1]) - 1
    mass = torch.where(filters.is_top_k, cumulative.gather(1, last), mass)
    # The first token is always kept; then every one whose predecessors do not reach the target.
    index = (cumulative < filters.top_p * mass).sum(dim=-1, keepdim=True)
    index = torch.where(filters.is_top_p, torch.minimum(index, last), last)
    return torch.maximum(ordered.gather(1, index), filters.min_p)
