"""A step and its pool as the kernels want them: the structs of kernels.h over NumPy arrays."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pdrt.kv.layout import KvLayout
from pdrt.model.attention import ForwardContext
from pdrt.model.batch import Row
from pdrt.model.native.library import Pool, Step, dtype_code

HEAD_DIM_MULTIPLE = 8
HEAD_DIM_MAX = 256


def can_attend(layout: KvLayout, device: torch.device) -> bool:
    """Whether the kernels know pools of this layout on this device."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    return (
        device.type == "cpu"
        and dtype_code(dtype) is not None
        and layout.head_dim % HEAD_DIM_MULTIPLE == 0
        and layout.head_dim <= HEAD_DIM_MAX
    )


class StepArrays:
    """Where the rows of one step live in the pool.

    Attributes:
        pool: PdrtPool.
        step: PdrtStep; its addresses are those of arrays that this object keeps alive.
        kv_heads, head_dim: of the pool.
    """

    def __init__(self, context: ForwardContext) -> None:
        """Describe the rows of `context`, whose pool `can_attend`."""
        layout, code = context.pool.layout, dtype_code(context.pool.tensor.dtype)
        assert code is not None, f"the kernels know no {layout.dtype}"
        self.kv_heads, self.head_dim = layout.kv_heads, layout.head_dim
        self.pool = Pool(
            context.pool.address, code, layout.page_size, layout.kv_heads, layout.layers,
            layout.head_dim,
        )  # fmt: skip
        rows = [*context.decode, *context.prefill]
        lengths = [len(row.token_ids) for row in rows]
        self._first = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=self._first[1:])
        self._context = np.array([row.end for row in rows], dtype=np.int32)
        self._tables = _tables(rows, layout.page_size)
        assert self._tables.min() >= 0, "page outside of the pool"
        assert self._tables.max() < context.pool.pages, "page outside of the pool"
        row_of = np.repeat(np.arange(len(rows)), lengths)
        positions = context.positions.numpy()
        pages = self._tables[row_of, positions // layout.page_size].astype(np.int64)
        self._slots = pages * layout.page_size + positions % layout.page_size
        self.step = Step(
            len(rows), len(row_of), self._tables.shape[1], self._first.ctypes.data,
            self._context.ctypes.data, self._tables.ctypes.data, self._slots.ctypes.data,
        )  # fmt: skip


def _tables(rows: Sequence[Row], page_size: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """(rows, pages) page tables, as far as they are used, padded with page 0."""
    used = [-(-row.end // page_size) for row in rows]
    tables = np.zeros((len(rows), max(used)), dtype=np.int32)
    for line, row, count in zip(tables, rows, used, strict=True):
        # Through array: NumPy takes several times as long to read a list of ints.
        line[:count] = array("i", row.pages[:count])
    return tables
