"""The reference attention backend: pages gathered by index, then torch's attention. Any device.

Decode rows go in groups of similar length, padded to the longest of their group; prefill chunks
go one by one, in blocks of queries. All index arrays and masks are made once per step and window.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdrt.model.attention import ForwardContext, LayerCall
from pdrt.model.batch import Row

GROUP_OVERHEAD_TOKENS = 512
"""Padding (tokens) that costs as much as one more group of decode rows; about 100 us per layer."""
QUERY_BLOCK_TOKENS = 512
"""Queries that share one mask: bounds the mask's size, and skips keys after the block."""


class DecodeGroup(msgspec.Struct, frozen=True):
    """Decode rows that are attended together."""

    members: Tensor
    """(rows,) index of each row's token."""
    blocks: Tensor
    """(rows * kv_heads * pages,) index of layer 0's keys in the pool as (-1, page * head_dim)."""
    mask: Tensor
    """(rows, 1, 1, pages * page_size) to add to the scores: 0 where there is a key to see."""


class QueryBlock(msgspec.Struct, frozen=True):
    """Queries `[first, last)` of a prefill chunk over the row's gathered keys `[low, high)`."""

    first: int
    last: int
    low: int
    high: int
    mask: Tensor | None
    """(queries, keys) to add to the scores, or None: plainly causal, both start at one token."""


class PrefillPlan(msgspec.Struct, frozen=True):
    """One prefill chunk."""

    part: slice
    """Its tokens in the step."""
    pages: Tensor | None
    """(kv_heads * pages,) as `DecodeGroup.blocks`; None: all keys are this step's own."""
    blocks: list[QueryBlock]


class SdpaBackend:
    """Implements `AttentionBackend` with plain torch operators."""

    def __init__(self) -> None:
        # A plan of cuDNN is made per shape, which takes long, and the shapes of most steps are new.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Gathered keys and values: kept, as fresh ones of this size cost a page fault per 4 KB.
        self._scratch: list[Tensor] = [torch.empty(0), torch.empty(0)]

    def attend(self, context: ForwardContext, call: LayerCall) -> Tensor:
        """See `AttentionBackend.attend`."""
        output = torch.empty_like(call.query, memory_format=torch.contiguous_format)
        if context.decode:
            for group in self._decode_plan(context, call.window):
                output[group.members] = self._decode(context, call, group)
        for plan in self._prefill_plan(context, call.window):
            output[plan.part] = self._prefill(context, call, plan)
        return output

    def _decode(self, context: ForwardContext, call: LayerCall, group: DecodeGroup) -> Tensor:
        layout = context.pool.layout
        query = call.query[group.members]
        rows, heads, head_dim = query.shape
        keys, values = (
            self._gather(context, group.blocks + (2 * call.layer + which), which).view(
                rows, layout.kv_heads, -1, head_dim
            )
            for which in (0, 1)
        )
        # A group of query heads that share a KV head are this head's queries: nothing is repeated.
        grouped = query.view(rows, layout.kv_heads, heads // layout.kv_heads, head_dim)
        if call.softcap is None:
            out = F.scaled_dot_product_attention(
                grouped, keys, values, attn_mask=group.mask, scale=call.scaling
            )
        else:
            out = _softcapped(grouped, keys, values, group.mask, call)
        return out.reshape(rows, heads, head_dim)

    def _prefill(self, context: ForwardContext, call: LayerCall, plan: PrefillPlan) -> Tensor:
        layout = context.pool.layout
        query = call.query[plan.part]
        tokens, heads, head_dim = query.shape
        if plan.pages is None:
            keys, values = (
                tensor[plan.part].transpose(0, 1).unsqueeze(1) for tensor in (call.key, call.value)
            )
        else:
            keys, values = (
                self._gather(context, plan.pages + (2 * call.layer + which), which).view(
                    layout.kv_heads, 1, -1, head_dim
                )
                for which in (0, 1)
            )
        group = heads // layout.kv_heads
        queries = query.view(tokens, layout.kv_heads, group, head_dim).permute(1, 2, 0, 3)
        parts: list[Tensor] = []
        for block in plan.blocks:
            q = queries[:, :, block.first : block.last]
            k, v = (
                t[:, :, block.low : block.high].expand(-1, group, -1, -1) for t in (keys, values)
            )
            if call.softcap is None:
                part = F.scaled_dot_product_attention(
                    q, k, v, block.mask, is_causal=block.mask is None, scale=call.scaling
                )
            else:
                mask = _causal(context, block) if block.mask is None else block.mask
                part = _softcapped(q, k, v, mask, call)
            parts.append(part.permute(2, 0, 1, 3).reshape(-1, heads, head_dim))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _gather(self, context: ForwardContext, blocks: Tensor, which: int) -> Tensor:
        """The pool's (page, kv_head, layer, k/v) blocks, one after another."""
        pool, layout = context.pool.tensor, context.pool.layout
        block_elements = layout.page_size * layout.head_dim
        needed = blocks.numel() * block_elements
        scratch = self._scratch[which]
        if scratch.numel() < needed:
            # Half as much again, so that a growing context does not reallocate at every page.
            scratch = torch.empty(needed * 3 // 2, dtype=pool.dtype, device=pool.device)
            self._scratch[which] = scratch
        target = scratch[:needed].view(-1, block_elements)
        return torch.index_select(pool.view(-1, block_elements), 0, blocks, out=target)

    def _decode_plan(self, context: ForwardContext, window: int | None) -> list[DecodeGroup]:
        plan: list[DecodeGroup] | None = context.plans.get(("decode", window))
        if plan is None:
            lengths = [
                row.end if window is None else min(row.end, window) for row in context.decode
            ]
            plan = [_decode_group(context, g, window) for g in group_by_length(lengths)]
            context.plans["decode", window] = plan
        return plan

    def _prefill_plan(self, context: ForwardContext, window: int | None) -> list[PrefillPlan]:
        plan: list[PrefillPlan] | None = context.plans.get(("prefill", window))
        if plan is None:
            plan = [
                _plan_prefill(context, row, offset, window)
                for row, offset in zip(context.prefill, context.prefill_offsets, strict=True)
            ]
            context.plans["prefill", window] = plan
        return plan


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Partition rows by length so that padding costs no more than the groups that would save it.

    Longest first; a group ends where cutting the shorter rest off saves more padded tokens than
    a group's overhead is worth.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    groups = [[order[0]]]
    for done, index in enumerate(order[1:], start=1):
        saved = (lengths[groups[-1][0]] - lengths[index]) * (len(order) - done)
        if saved > GROUP_OVERHEAD_TOKENS:
            groups.append([index])
        else:
            groups[-1].append(index)
    return groups


def _block_indices(context: ForwardContext, pages: np.ndarray[Any, Any]) -> Tensor:
    """Layer 0's key blocks of `pages` (..., pages) as flat (..., kv_heads, pages)."""
    layout = context.pool.layout
    heads = np.arange(layout.kv_heads, dtype=np.int64)
    blocks = (pages[..., None, :] * layout.kv_heads + heads[:, None]) * layout.layers * 2
    return context.to_device(blocks.reshape(-1))


def _decode_group(context: ForwardContext, members: list[int], window: int | None) -> DecodeGroup:
    size = context.pool.layout.page_size
    rows = [context.decode[index] for index in members]
    ends = np.array([row.end for row in rows], dtype=np.int64)
    lows = np.zeros_like(ends) if window is None else np.maximum(0, ends - window)
    first_pages = lows // size
    width = int((-(-ends // size) - first_pages).max())
    # Rows shorter than the group are padded with page 0, whose content is masked out.
    table = np.zeros((len(rows), width), dtype=np.int64)
    for line, row, first in zip(table, rows, first_pages.tolist(), strict=True):
        used = row.pages[first : -(-row.end // size)]
        line[: len(used)] = used
    positions = first_pages[:, None] * size + np.arange(width * size)
    mask = (positions >= lows[:, None]) & (positions < ends[:, None])
    return DecodeGroup(
        members=context.to_device(np.array(members, dtype=np.int64)),
        blocks=_block_indices(context, table),
        mask=_additive(context, mask)[:, None, None, :],
    )


def _plan_prefill(
    context: ForwardContext, row: Row, offset: int, window: int | None
) -> PrefillPlan:
    size = context.pool.layout.page_size
    tokens = len(row.token_ids)
    part = slice(offset, offset + tokens)
    low = 0 if window is None else max(0, row.start - window + 1) // size * size
    if row.start == 0 and (window is None or window >= tokens):
        return PrefillPlan(part, None, [QueryBlock(0, tokens, 0, tokens, None)])
    pages = None
    if row.start > 0:
        used = np.asarray(row.pages[low // size : -(-row.end // size)], dtype=np.int64)
        pages = _block_indices(context, used)
    blocks = []
    for first in range(0, tokens, QUERY_BLOCK_TOKENS):
        last = min(first + QUERY_BLOCK_TOKENS, tokens)
        seen = low if window is None else max(low, row.start + first - window + 1)
        queries = np.arange(row.start + first, row.start + last)[:, None]
        keys = np.arange(seen, row.start + last)[None, :]
        mask = keys <= queries
        if window is not None:
            mask &= keys > queries - window
        keys_last = row.start + last - low
        blocks.append(QueryBlock(first, last, seen - low, keys_last, _additive(context, mask)))
    return PrefillPlan(part, pages, blocks)


def _additive(context: ForwardContext, seen: np.ndarray[Any, Any]) -> Tensor:
    mask = context.to_device(~seen)
    zeros = torch.zeros(mask.shape, dtype=context.pool.tensor.dtype, device=mask.device)
    return zeros.masked_fill_(mask, float("-inf"))


def _causal(context: ForwardContext, block: QueryBlock) -> Tensor:
    shape = (block.last - block.first, block.high - block.low)
    return _additive(context, np.tri(*shape, dtype=np.bool_))


def _softcapped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, call: LayerCall) -> Tensor:
    """Attention whose scores pass through `softcap * tanh(score / softcap)`, as in Gemma 2."""
    assert call.softcap is not None, "only for layers that cap their scores"
    scores = torch.matmul(query, key.transpose(2, 3)) * (call.scaling / call.softcap)
    scores = torch.tanh(scores) * call.softcap + mask
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype), value)
