"""Steps over pools of random keys and values, and what attention must give, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from pdrt.model.native.library import Kernels, Pool, Step, dtype_code, pointer


class Shape(msgspec.Struct, frozen=True):
    """One call."""

    rows: Sequence[tuple[int, int]]
    """(tokens already in the pool, tokens of this step) of each row."""
    head_dim: int = 64
    kv_heads: int = 2
    group: int = 3
    page_size: int = 16
    layers: int = 2
    pool_type: torch.dtype = torch.float32
    query_type: torch.dtype = torch.float32
    window: int = 0
    softcap: float = 0.0


class Case:
    """A pool whose unused slots hold NaN, page tables in random order, and random queries."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        rng = torch.Generator().manual_seed(seed)
        contexts = [start + tokens for start, tokens in shape.rows]
        used = [-(-context // shape.page_size) for context in contexts]
        pages = sum(used) + 3
        self.pool = torch.full(
            (pages, shape.kv_heads, shape.layers, 2, shape.page_size, shape.head_dim),
            torch.nan,
        ).to(shape.pool_type)
        order = iter(torch.randperm(pages, generator=rng).tolist())
        # What lies behind a table's end is not read: a page that does not exist.
        self.tables = np.full((len(contexts), max(used)), 2**30, dtype=np.int32)
        for line, count in zip(self.tables, used, strict=True):
            line[:count] = [next(order) for _ in range(count)]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for line, context in zip(self.tables, contexts, strict=True):
            stored = torch.randn((2, context, shape.kv_heads, shape.head_dim), generator=rng).to(
                shape.pool_type
            )
            for position in range(context):
                page = int(line[position // shape.page_size])
                offset = position % shape.page_size
                # (2, kv_heads, head_dim) into the last layer of [kv_head, layer, k/v, token].
                self.pool[page, :, -1, :, offset] = stored[:, position].transpose(0, 1)
            self.keys.append(stored[0])
            self.values.append(stored[1])
        self.first = np.cumsum([0, *(tokens for _, tokens in shape.rows)], dtype=np.int32)
        self.context = np.array(contexts, dtype=np.int32)
        self.heads = shape.kv_heads * shape.group
        self.scale = 1.7 * shape.head_dim**-0.5
        # Wider than the heads: strides are honoured.
        self.query = torch.randn(
            (int(self.first[-1]), self.heads + 1, shape.head_dim), generator=rng
        ).to(shape.query_type)

    def pool_struct(self) -> Pool:
        shape = self.shape
        code = dtype_code(shape.pool_type)
        return Pool(
            self.pool.data_ptr(), code, shape.page_size, shape.kv_heads, shape.layers,
            shape.head_dim,
        )  # fmt: skip

    def step_struct(self) -> Step:
        rows, width = self.tables.shape
        return Step(
            rows, int(self.first[-1]), width, self.first.ctypes.data, self.context.ctypes.data,
            self.tables.ctypes.data, None,
        )  # fmt: skip

    def attend(self, kernels: Kernels) -> Tensor:
        """(tokens, heads, head_dim), as the kernels compute it."""
        out = torch.full_like(self.query, torch.nan)
        status = kernels.lib.pdrt_attend(
            self.pool_struct(), self.step_struct(), self.shape.layers - 1, self.heads,
            dtype_code(self.shape.query_type), pointer(self.query), self.query.stride(0),
            pointer(out), out.stride(0), self.scale, self.shape.softcap, self.shape.window,
        )  # fmt: skip
        assert status == 0, "the kernels refuse the shape"
        assert out[:, -1].isnan().all(), "written past the heads"
        return out[:, :-1]

    def expected(self) -> Tensor:
        """The same in float64, from the queries, keys and values as they are stored."""
        parts = []
        for row, (start, tokens) in enumerate(self.shape.rows):
            queries = self.query[self.first[row] : self.first[row + 1], :-1].double()
            keys = self.keys[row].double().repeat_interleave(self.shape.group, dim=1)
            values = self.values[row].double().repeat_interleave(self.shape.group, dim=1)
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.scale
            if self.shape.softcap:
                scores = torch.tanh(scores / self.shape.softcap) * self.shape.softcap
            query_at = torch.arange(start, start + tokens)[:, None]
            key_at = torch.arange(start + tokens)[None, :]
            hidden = key_at > query_at
            if self.shape.window:
                hidden |= key_at <= query_at - self.shape.window
            scores.masked_fill_(hidden, -torch.inf)
            parts.append(torch.einsum("hqk,khd->qhd", torch.softmax(scores, dim=-1), values))
        return torch.cat(parts)


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Largest difference, as a share of the root mean square of what is expected."""
    difference = (result.double() - expected).abs().max()
    return float(difference / expected.square().mean().sqrt())
