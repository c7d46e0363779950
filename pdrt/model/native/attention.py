"""Attention over KV pages by the compiled kernels: what describes a step to them, and the backend
of the transformers path.

    arrays = StepArrays(rows, pool)   # once per step
    kernels.lib.pdrt_attend(pool_struct(pool), arrays.struct, layer, …)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdrt.kv.pool import KvPool
from pdrt.model.attention import ForwardContext, LayerCall
from pdrt.model.batch import Row
from pdrt.model.native.library import Kernels, Pool, Step, dtype_code, pointer

HEAD_DIM_MULTIPLE = 8
HEAD_DIM_MAX = 256


def can_attend(pool: KvPool) -> bool:
    """Whether the kernels know pools like this one."""
    layout = pool.layout
    return (
        pool.tensor.device.type == "cpu"
        and dtype_code(pool.tensor.dtype) is not None
        and layout.head_dim % HEAD_DIM_MULTIPLE == 0
        and layout.head_dim <= HEAD_DIM_MAX
    )


def pool_struct(pool: KvPool) -> Pool:
    """PdrtPool of a pool that `can_attend`; valid as long as the pool is."""
    layout, code = pool.layout, dtype_code(pool.tensor.dtype)
    assert code is not None, f"the kernels know no {layout.dtype}"
    return Pool(
        pool.address, code, layout.page_size, layout.kv_heads, layout.layers, layout.head_dim
    )


class StepArrays:
    """Where the rows of one step live in the pool, as the kernels want it.

    Attributes:
        struct: PdrtStep; its addresses are those of arrays that this object keeps.
    """

    def __init__(self, rows: Sequence[Row], pool: KvPool) -> None:
        """Describe `rows`, in the order in which their tokens are packed."""
        size = pool.layout.page_size
        lengths = np.array([len(row.token_ids) for row in rows])
        starts = np.array([row.start for row in rows])
        self._first = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=self._first[1:])
        self._context = (starts + lengths).astype(np.int32)
        self._tables = _tables(rows, -(-self._context // size))
        assert self._tables.min() >= 0, "page outside of the pool"
        assert self._tables.max() < pool.pages, "page outside of the pool"
        row_of = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(len(row_of)) + (starts - self._first[:-1])[row_of]
        pages = self._tables[row_of, positions // size].astype(np.int64)
        self._slots = pages * size + positions % size
        self.struct = Step(
            len(rows), len(row_of), self._tables.shape[1], self._first.ctypes.data,
            self._context.ctypes.data, self._tables.ctypes.data, self._slots.ctypes.data,
        )  # fmt: skip


def _tables(
    rows: Sequence[Row], used: np.ndarray[tuple[int], np.dtype[np.int32]]
) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """(rows, pages) page tables, as far as they are used, padded with page 0."""
    tables = np.zeros((len(rows), int(used.max())), dtype=np.int32)
    for line, row, count in zip(tables, rows, used.tolist(), strict=True):
        # Through array: NumPy takes several times as long to read a list of ints.
        line[:count] = array("i", row.pages[:count])
    return tables


class NativeAttention:
    """Implements `AttentionBackend` with the compiled kernels."""

    def __init__(self, kernels: Kernels, pool: KvPool) -> None:
        """Attend over `pool`, of which `can_attend` is true."""
        self._attend = kernels.lib.pdrt_attend
        self._pool = pool_struct(pool)

    def attend(self, context: ForwardContext, call: LayerCall) -> Tensor:
        """See `AttentionBackend.attend`."""
        arrays: StepArrays | None = context.plans.get(StepArrays)
        if arrays is None:
            arrays = StepArrays([*context.decode, *context.prefill], context.pool)
            context.plans[StepArrays] = arrays
        query = call.query
        tokens, heads, head_dim = query.shape
        if query.stride()[1:] != (head_dim, 1):
            query = query.contiguous()
        code = dtype_code(query.dtype)
        assert code is not None, f"queries of {query.dtype}"
        out = torch.empty((tokens, heads, head_dim), dtype=query.dtype)
        status = self._attend(
            self._pool, arrays.struct, call.layer, heads, code, pointer(query), query.stride(0),
            pointer(out), heads * head_dim, call.scaling, call.softcap or 0.0, call.window or 0,
        )  # fmt: skip
        assert status == 0, f"the kernels refuse {heads} heads of {head_dim}"
        return out
