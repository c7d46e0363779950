"""Attention over KV pages, as transformers' models call it.

A step packs all rows into one batch of shape [1, tokens]: the decode rows (one token each) first,
then the prefill chunks. The models pass `forward_context` through their keyword arguments down to
`paged_attention`, which stores the step's keys and values in the pool and leaves the rest to a
backend. Nothing is global: two executors in one process do not meet.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from pdrt.errors import ModelError
from pdrt.kv.pool import KvPool
from pdrt.model.batch import Row

ATTENTION_NAME = "pdrt_paged"

UNSUPPORTED_ARGUMENTS = {
    "s_aux": "attention sinks",
    "position_bias": "an additive position bias",
    "block_indices": "block-sparse attention",
}


class LayerCall(msgspec.Struct, frozen=True):
    """What one layer asks of a backend."""

    query: Tensor
    """(tokens, heads, head_dim)."""
    key: Tensor
    """(tokens, kv_heads, head_dim), of this step's tokens only, and so are the values."""
    value: Tensor
    layer: int
    scaling: float
    softcap: float | None
    window: int | None
    """Tokens that a query sees, itself included; None for all before it."""


class AttentionBackend(Protocol):
    """Attends over the pages of a step; made once per executor."""

    def attend(self, context: ForwardContext, call: LayerCall) -> Tensor:
        """Attention of every token over its sequence's pages, which hold this step's KV already.

        Returns:
            (tokens, heads, head_dim), in the order of the queries.
        """
        ...


class ForwardContext:
    """Where the tokens of one step live in the pool; made per step.

    Attributes:
        decode: rows with one token, packed first; row i is token i.
        prefill: rows with more, packed after them.
        prefill_offsets: first token of each prefill row.
        plans: what a backend derived from the rows, kept for the layers that follow.
    """

    def __init__(self, pool: KvPool, rows: Sequence[Row], backend: AttentionBackend) -> None:
        self.pool = pool
        self.backend = backend
        decode = [index for index, row in enumerate(rows) if len(row.token_ids) == 1]
        prefill = [index for index, row in enumerate(rows) if len(row.token_ids) > 1]
        self.order = decode + prefill
        """Index, in the caller's rows, of each packed row."""
        self.decode = [rows[index] for index in decode]
        self.prefill = [rows[index] for index in prefill]
        self.plans: dict[object, Any] = {}
        packed = self.decode + self.prefill
        lengths = np.array([len(row.token_ids) for row in packed], dtype=np.int64)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        self.prefill_offsets: list[int] = starts[len(self.decode) :].tolist()
        self.tokens = int(ends[-1])
        token_ids = np.array([token for row in packed for token in row.token_ids], dtype=np.int64)
        offsets = np.array([row.start for row in packed], dtype=np.int64) - starts
        self._positions = np.arange(self.tokens) + np.repeat(offsets, lengths)
        self.token_ids = self.to_device(token_ids)
        self.positions = self.to_device(self._positions)
        sampled = [index for index, row in enumerate(packed) if row.sampling is not None]
        self.sampled = [self.order[index] for index in sampled]
        """Index, in the caller's rows, of each row whose next token is drawn."""
        scored = [index for index, row in enumerate(packed) if row.scored]
        self.scored = [self.order[index] for index in scored]
        """The same of each row with tokens to score."""
        positions_scored = [starts[i] + np.arange(len(packed[i].scored)) for i in scored]
        kept = np.concatenate([ends[sampled] - 1, *positions_scored])
        self.logits_to_keep = self.to_device(kept)
        """Tokens whose logits are wanted: of each sampled row, then of each scored token."""
        self.keeps_all_logits = np.array_equal(kept, np.arange(self.tokens))
        """Those are all tokens, in their order."""
        self._layers_stored = 0

    def to_device(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.pool.tensor.device)

    @functools.cached_property
    def _slots(self) -> Tensor:
        """Index, in the pool as (-1, head_dim), of layer 0's (token, kv_head, k/v); what the
        kernels store, they find themselves."""
        layout = self.pool.layout
        size = layout.page_size
        packed = (*self.decode, *self.prefill)
        pages = np.concatenate([_pages_written(row, size) for row in packed])
        heads = np.arange(layout.kv_heads, dtype=np.int64)
        page_head = pages[:, None] * layout.kv_heads + heads
        block = page_head[:, :, None] * layout.layers * 2 + np.arange(2)
        slots = block * size + (self._positions % size)[:, None, None]
        return self.to_device(slots.reshape(-1))

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write keys and values, both (tokens, kv_heads, head_dim), into the pages.

        Raises:
            ModelError: the layers do not come in order, once each: what they keep is not one key
                and one value per layer, and a second call would overwrite the first one's.
        """
        layout = self.pool.layout
        if layer != self._layers_stored:
            raise ModelError(
                f"attention of layer {layer} where that of layer {self._layers_stored} is expected:"
                " the model does not attend once per layer, and its KV is of another kind"
            )
        self._layers_stored += 1
        block = torch.stack((key, value), dim=2).view(-1, layout.head_dim)
        # Slots that are masked out are still multiplied, by a probability of 0: what one sequence
        # leaves in a page must be finite, or it would turn the next owner's outputs into NaN.
        torch.nan_to_num_(block)
        self.pool.tensor.view(-1, layout.head_dim).index_copy_(
            0, self._slots + layer * 2 * layout.page_size, block
        )

    def check_complete(self) -> None:
        """After a forward.

        Raises:
            ModelError: some layers attended in another way, past the pages.
        """
        if self._layers_stored != self.pool.layout.layers:
            raise ModelError(
                f"only {self._layers_stored} of {self.pool.layout.layers} layers attend over "
                "pages: the model does not use the attention interface"
            )


def _pages_written(row: Row, page_size: int) -> np.ndarray[Any, Any]:
    """The page of each of a row's tokens; the table is not read beyond: it may be long."""
    first = row.start // page_size
    pages = np.asarray(row.pages[first : (row.end - 1) // page_size + 1], dtype=np.int64)
    return np.asarray(pages[np.arange(row.start, row.end) // page_size - first])


def layer_window(module: nn.Module, layer: int) -> int | None:
    """The sliding window of a layer whose model shows it only in the masks it would build."""
    config: Any = getattr(module, "config", None)
    window: int | None = getattr(config, "sliding_window", None)
    layer_types: Sequence[str] | None = getattr(config, "layer_types", None)
    if layer_types:
        return window if layer_types[layer] == "sliding_attention" else None
    return window if getattr(config, "use_sliding_window", True) else None


def _refuse_unsupported(module: nn.Module, mask: Tensor | None, arguments: dict[str, Any]) -> None:
    name = type(module).__name__
    for argument, meaning in UNSUPPORTED_ARGUMENTS.items():
        if arguments.get(argument) is not None:
            raise ModelError(f"{name} uses {meaning}, which the paged attention does not know")
    if mask is not None:
        raise ModelError(f"{name} builds its own attention mask; only causal masks are supported")
    if not arguments.get("is_causal", getattr(module, "is_causal", True)):
        raise ModelError(f"{name} is not causal; only decoder-only models are supported")


def paged_attention(  # noqa: PLR0913, PLR0917 (the signature is transformers')
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """What transformers calls per layer: store the step's KV, attend over pages.

    Args:
        query: (1, heads, tokens, head_dim), rotated already.
        key, value: (1, kv_heads, tokens, head_dim).
        arguments: the model's own (`sliding_window`, `softcap`) and our `forward_context`.

    Returns:
        (1, tokens, heads, head_dim), and no attention weights.

    Raises:
        ModelError: the model asks for something that pages or backend cannot give.
    """
    context: ForwardContext | None = arguments.get("forward_context")
    if context is None:
        raise ModelError(
            f"{type(module).__name__} does not hand keyword arguments down to its attention"
        )
    _refuse_unsupported(module, attention_mask, arguments)
    layout, layer = context.pool.layout, int(getattr(module, "layer_idx", -1))
    expected = (1, layout.kv_heads, context.tokens, layout.head_dim)
    if not 0 <= layer < layout.layers or key.shape != expected or value.shape != expected:
        raise ModelError(
            f"{type(module).__name__} (layer {layer}) has keys {tuple(key.shape)} and values "
            f"{tuple(value.shape)} where the pool holds {expected}: its KV is not uniform"
        )
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    call = LayerCall(
        query=query,
        key=key,
        value=value,
        layer=layer,
        scaling=layout.head_dim**-0.5 if scaling is None else scaling,
        softcap=arguments.get("softcap"),
        window=arguments["sliding_window"]
        if "sliding_window" in arguments
        else layer_window(module, layer),
    )
    context.store(layer, key, value)
    return context.backend.attend(context, call)[None], None


def register() -> None:
    """Make `ATTENTION_NAME` known to transformers; idempotent.

    No mask function is registered under that name, so the models build no masks at all.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
